"""Standard output of a command: a terminal, a file whose disk may be full, or a pipe whose reader may have ended."""

import io
import select
import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

STDOUT = 1
"""The file descriptor of standard output."""

_FOLDED = 12
"""Least width of a column whose names may be folded."""

_WIDE = 10_000
"""A width at which no text is cut."""


class OutputConsole(Console):
    """A console that prints tables without trailing blanks, and raises BrokenPipeError when its reader has ended."""

    def show(self, drawing: Table | Text) -> None:
        """Print a table, or lines of text, without cutting words."""
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
        """Return the least width of a table column at which no word is cut; text that may fold needs less."""
        wide = self.options.update(width=_WIDE)
        sizes = [Measurement.get(self, wide, cell) for cell in (column.header, *column.cells)]
        least = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        return max(column.min_width or 0, min(least, _FOLDED) if column.overflow == "fold" else least)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again; rich would end the process with status 1."""
        raise  # noqa: PLE0704 -- the BrokenPipeError that rich is handling


def console_of_width(width: int) -> OutputConsole:
    """Return the console of stdout; where that is not a terminal, its lines have at most `width` columns."""
    return OutputConsole() if OutputConsole().is_terminal else OutputConsole(width=width)


def text_table(rows: Sequence[tuple[str, ...]], *, wrapped: Collection[str] = (), failed: str = "") -> Table:
    """Return a table whose titles are the first row.

    Columns whose title is in `wrapped` are aligned to the left and may wrap. A row with a cell that ends in `failed` is
    red.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(rows[0]):
        left = number == 0 or title in wrapped
        table.add_column(title, justify="left" if left else "right", no_wrap=title not in wrapped, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row, style="red" if failed and any(cell.endswith(failed) for cell in row) else None)
    return table


def replace_missing_characters() -> None:
    """Make stdout write `?` for a character that its encoding lacks, as under PYTHONIOENCODING=ascii."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def is_unread() -> bool:
    """Return whether stdout is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def stdout_failed() -> bool:
    """Return whether an OSError may come from stdout: its reader has ended, or its disk is full."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return is_unread()


def counted(number: int, *, of: str) -> str:
    """Return a number with its noun, as in `1 step` or `1,000 steps`."""
    return f"{number:,} {of}{'s' * (number != 1)}"
