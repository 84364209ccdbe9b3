"""The keys of a plan: what each means, which values it takes, and how a value is read and shown.

A key is a field of the dataclass `Plan` that carries its `Key` as metadata. The check, the command line and the
documentation all follow from the one line that declares it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


class PlanError(ValueError):
    """A plan that cannot work; the message names the conflict and the nearest plan that works."""


MOST = 2**20
"""Of ranks, and of what a plan counts: more than there ever are, and few enough to go through."""

_POWERS: Mapping[str, int] = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_size(written: str) -> int | None:
    """Bytes, of `2G`, `1.5G` or `2147483648`; None when it is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", written)
    size = float(found[1]) * _POWERS[found[2]] if found else math.inf
    return int(size) if size < math.inf else None


@dataclass(frozen=True)
class Key:
    """Meaning and values of a plan key: whole numbers between two bounds, or one of a few words.

    | file    instead of one of the words, the path of a file: with a `/` or a `.` in it
    | auto    the word `auto` stands for None: a value that the world fills in
    | size    a number of bytes, which may be written with K, M, G or T for powers of 1024: `2G`
    """

    meaning: str
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()
    auto: bool = False
    size: bool = False
    file: bool = False

    def read(self, value: Any) -> Any:
        """Return the value written in TOML; what cannot be read stays, for `check` to refuse."""
        if self.auto and value == "auto":
            return None
        size = read_size(value) if self.size and isinstance(value, str) else None
        return value if size is None else size

    def show(self, value: Any) -> int | str:
        """Return the shortest value that `read` gives back."""
        if value is None:
            return "auto"
        if not (self.size and isinstance(value, int) and value):
            return value  # type: ignore[no-any-return]
        letter = next((letter for letter in "TGMK" if value % _POWERS[letter] == 0), "")
        return f"{value // _POWERS[letter]}{letter}" if letter else value

    def range(self) -> str:
        """Return the values in words, as markdown."""
        if self.words:
            file = ", or the path of a file" if self.file else ""
            return ", ".join(f"`{word}`" for word in self.words) + file
        auto = ", or `auto` (None in Python)" if self.auto else ""
        size = ", with K, M, G or T for powers of 1024" if self.size else ""
        return (f"{self.least} and up" if self.most is None else f"{self.least} to {self.most}") + auto + size

    def check(self, value: Any, *, name: str) -> None:
        """Raise PlanError when a value is of the wrong kind or out of range."""
        if self.auto and value is None:
            return
        if self.words:
            if value not in self.words and not (self.file and is_path(value)):
                near = difflib.get_close_matches(str(value), self.words, n=1, cutoff=0.3) or self.words[:1]
                file = ", or the path of a file, as in ./mine.txt" if self.file else ""
                raise PlanError(
                    f"{name}={value}: {name} is one of {' '.join(self.words)}{file}. "
                    f"Nearest that works: '{name}={near[0]}'"
                )
            return
        if type(value) is not int:
            given = "auto" if value in (None, "auto") else repr(value)
            example = "2G" if self.size else self.most or self.least
            raise PlanError(
                f"{name}={given}: {name} is a whole number, {self.range()}; write it as in '{name}={example}'"
            )
        if value > MOST and self.most is None and not self.size:
            raise PlanError(f"{name}={value}: {name} is at most {MOST}. Nearest that works: '{name}={MOST}'")
        nearest = max(self.least, value if self.most is None else min(value, self.most))
        if value != nearest:
            raise PlanError(f"{name}={value}: {name} is {self.range()}. Nearest that works: '{name}={nearest}'")


def whole_number(default: int, *, means: str, least: int = 1, most: int | None = None, auto: bool = False) -> Any:
    """Return a field that takes whole numbers."""
    return field(default=default, metadata={"key": Key(means, least, most, auto=auto)})


def byte_count(means: str) -> Any:
    """Return a field that takes a number of bytes, none by default."""
    return field(default=0, metadata={"key": Key(means, size=True)})


def one_of(words: str, *, means: str, file: bool = False) -> Any:
    """Return a field that takes one of `words`, the first by default; `file`: or a path."""
    choices = tuple(words.split())
    return field(default=choices[0], metadata={"key": Key(means, words=choices, file=file)})


def is_path(value: object) -> bool:
    """Return whether a value is the path of a file rather than a word."""
    return isinstance(value, str) and ("/" in value or "." in value) and value.isprintable() and '"' not in value


_APART = re.compile(r" |[,;](?:$|[-\w]+=)")
"""What would end a word in the text of a plan."""


def in_words(value: int | str) -> str:
    """Return a value as a plan's text has it, in quotes where needed."""
    return f'"{value}"' if isinstance(value, str) and _APART.search(value) else str(value)


def keys_of(plan: Any) -> Mapping[str, Key]:
    """Return the keys of a plan, or of the class, in the order they are declared."""
    return _keys_of(plan if isinstance(plan, type) else type(plan))


@functools.cache
def _keys_of(kind: type) -> Mapping[str, Key]:
    return MappingProxyType({item.name: item.metadata["key"] for item in dataclasses.fields(kind)})
