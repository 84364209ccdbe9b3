"""Where a command writes: a terminal, a file whose disk may be full, or a pipe whose reader may have seen enough."""

from __future__ import annotations

import codecs
import io
import select
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

STDOUT = 1

_HANDLER = "meshwise: what looks like it"
"""The name of a way to encode."""

_STAND_INS: Mapping[str, str] = {
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("─━–—−", "-"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
    **dict.fromkeys("·…", "."),
    "░": ":",
    "▒": "~",
    "×": "x",
    "µ": "u",
}
"""As wide as what it stands for: columns stay where they are."""

_FOLDED = 12
"""Columns that names get at least where they are folded."""

_WIDE = 10_000
"""A terminal on which nothing is cut."""


class OutputConsole(Console):
    """A console that leaves no blanks at the ends of drawn lines, and hands on that nobody reads it any more."""

    def show(self, drawing: Table | Text) -> None:
        """Print a table, or lines that are as long as they are, to be copied as they stand."""
        if isinstance(drawing, Text):
            lines = list(drawing.split(allow_blank=True))
        else:
            for column in drawing.columns:
                column.min_width = self._least(column)
            least = sum((column.min_width or 0) + sum(drawing.padding[1::2]) for column in drawing.columns)
            options = self.options.update(width=max(self.width, least))
            if self.soft_wrap:
                options = options.update(no_wrap=True, overflow="ignore")
            lines = [
                Text.assemble(*((part.text, part.style or "") for part in line))
                for line in Segment.split_lines(self.render(drawing, options))
            ]
        for line in lines:
            line.rstrip()
            self.print(line, soft_wrap=True)

    def _least(self, column: Column) -> int:
        """Return the least width of a table column: no word is cut, and only foldable text folds."""
        wide = self.options.update(width=_WIDE)
        sizes = [Measurement.get(self, wide, cell) for cell in (column.header, *column.cells)]
        least = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        return max(column.min_width or 0, min(least, _FOLDED) if column.overflow == "fold" else least)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here, with status 1 and without a word."""
        raise  # noqa: PLE0704 -- the BrokenPipeError that it is being asked about


def screen(*, width: int) -> OutputConsole:
    """Return the terminal; elsewhere, lines of at most this width."""
    return OutputConsole() if OutputConsole().is_terminal else OutputConsole(width=width)


def tolerate() -> None:
    """Let stdout have for what its encoding lacks (`LC_ALL=C`, ISO-8859-1) what looks most like it, or a question mark:
    no run fails for that, and drawings can be read.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_HANDLER, _stand_in)
        sys.stdout.reconfigure(errors=_HANDLER)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacked = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(letter, "?") for letter in lacked), error.end


def is_unread() -> bool:
    """Return whether stdout is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def takes_no_more() -> bool:
    """Return whether an error may be that of stdout: nobody reads it, or what was written to it finds no room."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return is_unread()
