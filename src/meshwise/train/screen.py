"""Where a command writes: a terminal, a file whose disk may be full, or a pipe whose reader may have seen enough."""

from __future__ import annotations

import io
import select
import sys

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

STDOUT = 1


class Screen(Console):
    """A console that leaves no blanks at the ends of drawn lines, and hands on that nobody reads it any more."""

    def show(self, drawing: Table | Text) -> None:
        """Print a table, or lines that are as long as they are, to be copied as they stand."""
        if isinstance(drawing, Text):
            lines = list(drawing.split(allow_blank=True))
        else:
            options = self.options.update(no_wrap=True, overflow="ignore") if self.soft_wrap else None
            lines = [
                Text.assemble(*((part.text, part.style or "") for part in line))
                for line in Segment.split_lines(self.render(drawing, options))
            ]
        for line in lines:
            line.rstrip()
            self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here, with status 1 and without a word."""
        raise  # noqa: PLE0704 -- the BrokenPipeError that it is being asked about


def screen(*, width: int) -> Screen:
    """The terminal; elsewhere, lines of at most this width."""
    return Screen() if Screen().is_terminal else Screen(width=width)


def tolerate() -> None:
    """Let stdout have question marks for what its encoding lacks (`LC_ALL=C`, ISO-8859-1): no run fails for that."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def is_unread() -> bool:
    """Whether stdout is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def takes_no_more() -> bool:
    """Whether an error may be that of stdout: nobody reads it, or what was written to it finds no room."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return is_unread()
