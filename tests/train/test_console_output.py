"""The console of commands: tables that are not cut, and a reader that may end early."""

from __future__ import annotations

import io
import sys

import pytest
from rich.text import Text

from meshwise.train.console_output import OutputConsole, replace_missing_characters, text_table


class Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _: str, /) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("width", [24, 30])
def test_no_figure_is_cut_on_a_narrow_terminal_and_names_are_folded(width: int) -> None:
    out = io.StringIO()
    rows = [("name", "difference", "part"), ("a.name.that.is.long", "4.1e-01", "52.0 %")]
    OutputConsole(file=out, width=width).show(text_table(rows, wrapped=("name",)))
    text = out.getvalue()
    assert "4.1e-01" in text
    assert "52.0 %" in text
    assert "".join(line.split()[0] for line in text.splitlines() if line[0] != " ")[-19:] == "a.name.that.is.long"


def test_a_picture_wider_than_the_terminal_is_not_cut() -> None:
    out = io.StringIO()
    OutputConsole(file=out, width=20).show(Text("drawn wider than the terminal is\nup"))
    assert out.getvalue() == "drawn wider than the terminal is\nup\n"


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
