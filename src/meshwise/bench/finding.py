"""Findings of an examination: facts, and problems with their remedy in one sentence each."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class MachineFinding:
    """`ok`: works. `note`: works here and may not elsewhere. `problem`: ranks cannot train until it is remedied."""

    level: Level
    what: str
    remedy: str = ""


def problem(what: str, *, remedy: str) -> MachineFinding:
    """Something that has to change before ranks can train."""
    return MachineFinding("problem", what, remedy)


def note(what: str, *, remedy: str) -> MachineFinding:
    """Something to know."""
    return MachineFinding("note", what, remedy)
