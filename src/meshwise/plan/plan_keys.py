"""The keys of a plan: their meaning and values, and how a value is read, checked and shown.

A key is a field of the dataclass `Plan` with a `Key` as metadata. The check, the command line and the documentation are
all made from this one line.
"""

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


LARGEST_COUNT = 2**20
"""The largest number of ranks, and of anything else that a plan counts."""

_POWERS: Mapping[str, int] = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_size(written: str) -> int | None:
    """Return the bytes of a size such as `2G`, `1.5G` or `2147483648`; None when the text is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", written)
    size = float(found[1]) * _POWERS[found[2]] if found else math.inf
    return int(size) if size < math.inf else None


@dataclass(frozen=True)
class Key:
    """Meaning and values of a plan key: whole numbers between two bounds, or one of a few words.

    | least, most   the bounds of a whole number; None: `LARGEST_COUNT`
    | words         the words; empty for a whole number
    | auto          whether `auto` is a value: None in Python, and the world fills it in
    | size          whether it is a number of bytes, which may be written with K, M, G or T for powers of 1024: `2G`
    | file          whether the path of a file is a value too: it has a `/` or a `.` in it
    """

    meaning: str
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()
    auto: bool = False
    size: bool = False
    file: bool = False

    def read(self, value: Any) -> Any:
        """Return the value that is written in TOML; `check` refuses what cannot be read."""
        if self.auto and value == "auto":
            return None
        size = read_size(value) if self.size and isinstance(value, str) else None
        return value if size is None else size

    def show(self, value: Any) -> int | str:
        """Return the shortest notation that `read` turns into the value."""
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
                file = ", or the path of a file, as in ./mine.txt" if self.file else ""
                raise PlanError(
                    f"{name}={value}: {name} is one of {' '.join(self.words)}{file}. "
                    f"Nearest that works: '{name}={_near(str(value), self.words)}'"
                )
            return
        if type(value) is not int:
            given = "auto" if value in (None, "auto") else repr(value)
            example = "2G" if self.size else self.most or self.least
            raise PlanError(
                f"{name}={given}: {name} is a whole number, {self.range()}; write it as in '{name}={example}'"
            )
        if value > LARGEST_COUNT and self.most is None and not self.size:
            raise PlanError(
                f"{name}={value}: {name} is at most {LARGEST_COUNT}. Nearest that works: '{name}={LARGEST_COUNT}'"
            )
        nearest = max(self.least, value if self.most is None else min(value, self.most))
        if value != nearest:
            raise PlanError(f"{name}={value}: {name} is {self.range()}. Nearest that works: '{name}={nearest}'")


def whole_number(default: int, *, means: str, least: int = 1, most: int | None = None, auto: bool = False) -> Any:
    """Return a field that takes whole numbers."""
    return field(default=default, metadata={"key": Key(means, least, most, auto=auto)})


def byte_count(means: str) -> Any:
    """Return a field that takes a number of bytes, 0 by default."""
    return field(default=0, metadata={"key": Key(means, size=True)})


def one_of(words: str, *, means: str, file: bool = False) -> Any:
    """Return a field that takes one of `words`, the first by default; `file`: or a path."""
    choices = tuple(words.split())
    return field(default=choices[0], metadata={"key": Key(means, words=choices, file=file)})


def is_path(value: object) -> bool:
    """Return whether a value is the path of a file rather than a word."""
    return isinstance(value, str) and ("/" in value or "." in value) and value.isprintable() and '"' not in value


_APART = re.compile(r" |[,;](?:$|[-\w]+=)")
"""Characters that end a word in the text of a plan."""


def plan_notation(value: int | str) -> str:
    """Return a value in the notation of a plan's text, in quotes where needed."""
    return f'"{value}"' if isinstance(value, str) and _APART.search(value) else str(value)


def keys_of(plan: Any) -> Mapping[str, Key]:
    """Return the keys of a plan, or of the class, in the order they are declared."""
    return _keys_of(plan if isinstance(plan, type) else type(plan))


@functools.cache
def _keys_of(kind: type) -> Mapping[str, Key]:
    return MappingProxyType({item.name: item.metadata["key"] for item in dataclasses.fields(kind)})


TIERS = ("device", "cpu", "disk")
NO_OFFLOAD = "none"


@dataclass(frozen=True)
class Offload:
    """Tiers of the state of a training: `device`, `cpu` or `disk`. Prints as a short text that parses back."""

    optimizer: str = "device"
    masters: str = "device"
    gradients: str = "device"
    params: str = "device"
    activations: str = "device"

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """Read `none` or `what:tier` joined by commas. Raises PlanError."""
        given: dict[str, str] = {}
        for word in text.split(",") if text != NO_OFFLOAD else ():
            what, colon, tier = word.partition(":")
            if what not in OFFLOADABLE or not colon or tier not in TIERS:
                near = _near(what, OFFLOADABLE), _near(tier, TIERS[1:])
                raise PlanError(
                    f"offload={text}: {word!r} is not what:tier, of {' '.join(OFFLOADABLE)} and {' '.join(TIERS)}. "
                    f"Nearest that works: 'offload={near[0]}:{near[1]}'"
                )
            if what in given:
                raise PlanError(f"offload={text}: {what} is given twice. Nearest that works: 'offload={what}:{tier}'")
            given[what] = tier
        made = cls(**_followed(given))
        if made.optimizer == "device" and (made.masters, made.params) != ("device", "device"):
            nearest = cls(**_followed(given | {"optimizer": "cpu"}))
            raise PlanError(
                f"offload={text}: the update runs where the optimizer's state is, so that state cannot stay on the "
                f"device when masters or params leave it. Nearest that works: 'offload={nearest}'"
            )
        return made

    def __str__(self) -> str:
        given: dict[str, str] = {}
        for what in OFFLOADABLE:
            if getattr(self, what) != _followed(given)[what]:
                given[what] = getattr(self, what)
        for what in [what for what in given if len(given) > 1]:
            less = {other: tier for other, tier in given.items() if other != what}
            if _followed(less) == dataclasses.asdict(self):
                given = less
        return ",".join(f"{what}:{tier}" for what, tier in given.items()) or NO_OFFLOAD

    @property
    def state_tiers(self) -> set[str]:
        """Tiers of all that an update needs."""
        return {self.optimizer, self.masters, self.gradients, self.params}

    @property
    def updates_on_cpu(self) -> bool:
        """True if the optimizer runs on the CPU whatever the device."""
        return self.optimizer != "device"

    @property
    def uses_disk(self) -> bool:
        """True if any state is stored on disk."""
        return "disk" in (self.optimizer, self.masters, self.gradients, self.params)


OFFLOADABLE = tuple(item.name for item in dataclasses.fields(Offload))


@dataclass(frozen=True)
class OffloadKey(Key):
    """A key whose values are texts of `Offload`."""

    def read(self, value: Any) -> Any:
        """Return the shortest text with the same meaning; `check` refuses what cannot be read."""
        try:
            return str(Offload.parse(value)) if isinstance(value, str) else value
        except PlanError:
            return value

    def range(self) -> str:
        """Return the values in words, as markdown."""
        return f"`none`, or `what:tier` joined by commas: {', '.join(OFFLOADABLE)}; {', '.join(TIERS[1:])}"

    def check(self, value: Any, *, name: str) -> None:
        """Raise PlanError for anything but a text of `Offload`."""
        if not isinstance(value, str):
            raise PlanError(f"{name}={value!r}: {name} is a text; write it as in '{name}=optimizer:cpu'")
        Offload.parse(value)


def offload(means: str) -> Any:
    """Return a field that takes texts of `Offload`, none by default."""
    return field(default=NO_OFFLOAD, metadata={"key": OffloadKey(means, words=(NO_OFFLOAD,))})


def _followed(given: dict[str, str]) -> dict[str, str]:
    """Return all tiers: the given ones, and those that follow from them."""
    tiers = dict.fromkeys(OFFLOADABLE, "device") | given
    if "optimizer" not in given and (tiers["masters"], tiers["params"]) != ("device", "device"):
        tiers["optimizer"] = "cpu"
    if "masters" not in given:
        tiers["masters"] = tiers["optimizer"]
    if "gradients" not in given and tiers["optimizer"] != "device":
        tiers["gradients"] = "cpu"
    return tiers


def _near(word: str, words: tuple[str, ...]) -> str:
    return (difflib.get_close_matches(word, words, n=1, cutoff=0.3) or words[:1])[0]
