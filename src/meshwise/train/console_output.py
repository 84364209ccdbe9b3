"""Print text and tables to standard output: a terminal, a pipe whose reader may have ended, a file on a full disk."""

import io
import select
import sys
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

STDOUT = 1
"""The file descriptor of standard output."""


class OutputConsole(Console):
    """A rich console that prints tables and text without cutting lines, and that raises BrokenPipeError."""

    def show(self, drawing: Table | Text) -> None:
        """Print a table or text without cutting long lines; the terminal wraps them."""
        self.print(drawing, crop=False, soft_wrap=isinstance(drawing, Text))

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again; by default rich would end the process with status 1."""
        raise  # noqa: PLE0704 -- the BrokenPipeError that rich is handling


def console_of_width(width: int) -> OutputConsole:
    """Return a console on stdout. If stdout is no terminal, its lines have at most `width` columns."""
    return OutputConsole() if OutputConsole().is_terminal else OutputConsole(width=width)


def text_table(rows: Sequence[tuple[str, ...]], *, wrapped: Collection[str] = (), failed: str = "") -> Table:
    """Return a rich table of text cells; the first row holds the titles of the columns.

    Columns whose title is in `wrapped` are aligned to the left, and their long cells wrap. A row is red if a cell
    ends with the text `failed`; "" makes no row red."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(rows[0]):
        is_wrapped = title in wrapped
        width = None if is_wrapped else max(cell_len(row[number]) for row in rows)
        table.add_column(
            title,
            justify="left" if number == 0 or is_wrapped else "right",
            no_wrap=not is_wrapped,
            min_width=width,
            overflow="fold",
        )
    for row in rows[1:]:
        style = "red" if failed and any(cell.endswith(failed) for cell in row) else None
        table.add_row(*map(Text, row), style=style)
    return table


def replace_missing_characters() -> None:
    """Make stdout write `?` for a character that its encoding lacks, as under PYTHONIOENCODING=ascii."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def stdout_failed() -> bool:
    """Return whether writing to stdout fails because its reader has ended or its disk is full. Flushes stdout."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def counted(number: int, *, of: str) -> str:
    """Return a number and the noun `of`, with an s for the plural: `1 step`, `1,000 steps`."""
    return f"{number:,} {of}{'s' * (number != 1)}"
