"""The console of commands: lines without trailing blanks, and a reader that may end early."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Column, Table
from rich.text import Text

from meshwise.train.output_stream import OutputConsole, replace_missing_characters


class Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _: str, /) -> int:
        raise BrokenPipeError


def test_drawn_lines_have_no_blanks_at_their_ends() -> None:
    out = io.StringIO()
    screen = OutputConsole(file=out, width=20)
    table = Table("name", "what", box=None, pad_edge=False)
    table.add_row("a", "long enough")
    table.add_row("b", "")
    screen.show(table)
    screen.show(Text("drawn wider than the screen   \nup   "))
    assert out.getvalue() == "name  what\na     long enough\nb\ndrawn wider than the screen\nup\n"


@pytest.mark.parametrize("width", [1, 20, 30])
def test_no_figure_is_cut_on_a_narrow_terminal_and_names_are_folded(width: int) -> None:
    out = io.StringIO()
    table = Table(Column("name", overflow="fold"), "difference", Column("part", no_wrap=True), box=None, pad_edge=False)
    table.add_row("a.name.that.is.long", "4.1e-01", "52.0 %")
    OutputConsole(file=out, width=width).show(table)
    head, first, *rest = (line.split() for line in out.getvalue().splitlines())
    assert head == ["name", "difference", "part"]
    assert first[1:] == ["4.1e-01", "52.0", "%"]
    assert first[0] + "".join(line[0] for line in rest) == "a.name.that.is.long"


def test_characters_that_an_encoding_lacks_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    replace_missing_characters()
    sys.stdout.write("ranks 0–1 │ µ\n")
    sys.stdout.flush()
    assert raw.getvalue().decode("latin-1") == "ranks 0?1 ? µ\n"


def test_a_reader_that_is_gone_is_told_to_the_caller() -> None:
    with pytest.raises(BrokenPipeError):
        OutputConsole(file=Unread()).print("nobody reads this")
