"""The kinds of keys of a plan: the meaning and range of their values, and how to read, check and show a value.

Each key is a field of `Plan` with a `Key` as metadata, from `keys.toml` (`plan_key`). The check, the command line and
docs/plans.md use it.

`read_words` reads the text of a plan, as docs/plans.md shows it. `dp=4x8` gives two keys: dp and shards. A path with
spaces is written in double quotes: `schedule="my tables/one.txt"`."""

import contextlib
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshwise.base.package_table import package_table


class PlanError(ValueError):
    """Error for a plan that cannot work; the message names the conflict and the nearest plan that works."""


LARGEST_COUNT = 2**20
"""The largest number of ranks, and the largest value of a key that counts something other than bytes."""
_POWERS: Mapping[str, int] = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_size(written: str) -> int | None:
    """Return the number of bytes of a text such as `2G`, `1.5G` or `2147483648`; None for another text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", written)
    size = float(found[1]) * _POWERS[found[2]] if found else math.inf
    return int(size) if size < math.inf else None


@dataclass(frozen=True)
class Key:
    """Meaning and values of one key of a plan: whole numbers between two bounds, or a few words.

    | meaning       one line for the documentation
    | least, most   bounds of a whole number; a `most` of None is `LARGEST_COUNT`, or no bound for bytes
    | words         the words; empty for a whole number
    | auto          whether `auto` is allowed: None in Python (for `dp`, until `Plan.resolve` replaces it)
    | size          whether the number counts bytes, and may be written with K, M, G or T for powers of 1024: `2G`
    | file          whether the path of a file is allowed too: a text with `/` or `.`
    | parse         for values with their own notation: reads a text into an object that prints as a text of the same
    |               meaning, or raises PlanError
    | form          with `parse`, the values besides `words`, as Markdown"""

    meaning: str
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()
    auto: bool = False
    size: bool = False
    file: bool = False
    parse: Callable[[str], Any] | None = None
    form: str = ""

    def read(self, value: Any) -> Any:
        """Return the Python value of a TOML value. An invalid value is returned unchanged, and `check` refuses it."""
        if self.auto and value == "auto":
            return None
        if self.parse is not None and isinstance(value, str | int):
            value = str(value)
            with contextlib.suppress(PlanError):
                return str(self.parse(value))
        size = read_size(value) if self.size and isinstance(value, str) else None
        return value if size is None else size

    def show(self, value: Any) -> int | str:
        """Return the shortest TOML value that `read` turns into `value`."""
        if value is None:
            return "auto"
        if not (self.size and isinstance(value, int) and value):
            return value  # type: ignore[no-any-return]
        letter = next((letter for letter in "TGMK" if value % _POWERS[letter] == 0), "")
        return f"{value // _POWERS[letter]}{letter}" if letter else value

    def range(self) -> str:
        """Return a description of the allowed values, as Markdown."""
        if self.words:
            form = "or the path of a file" if self.file else self.form
            return ", ".join(filter(None, [*(f"`{word}`" for word in self.words), form]))
        auto = ", or `auto` (None in Python)" if self.auto else ""
        size = ", with K, M, G or T for powers of 1024" if self.size else ""
        return (f"{self.least} and up" if self.most is None else f"{self.least} to {self.most}") + size + auto

    def check(self, value: Any, *, name: str) -> None:
        """Raise PlanError when a value is of the wrong type or out of range. `name`: the key, for the message."""
        if self.auto and value is None:
            return
        if self.parse is not None:
            if not isinstance(value, str):
                raise PlanError(f"{name}={value!r}: {name} is a text; write it as in '{name}={self.words[0]}'")
            self.parse(value)
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
            raise PlanError(f"{name}={given}: {name} is a whole number, {self.range()}; write '{name}={example}'")
        if value > LARGEST_COUNT and self.most is None and not self.size:
            raise PlanError(
                f"{name}={value}: {name} is at most {LARGEST_COUNT}. Nearest that works: '{name}={LARGEST_COUNT}'"
            )
        nearest = max(self.least, value if self.most is None else min(value, self.most))
        if value != nearest:
            raise PlanError(f"{name}={value}: {name} is {self.range()}. Nearest that works: '{name}={nearest}'")


def is_path(value: object) -> bool:
    """Return whether a value can be the path of a file: a printable text with `/` or `.`, without double quotes."""
    return isinstance(value, str) and ("/" in value or "." in value) and value.isprintable() and '"' not in value


_APART = re.compile(r" |[,;](?:$|[-\w]+=)")
"""Characters that would end a word in the text of a plan, so a value with them is quoted."""


def plan_notation(value: int | str) -> str:
    """Return a value as it is written in the text of a plan, in double quotes where needed."""
    return f'"{value}"' if isinstance(value, str) and _APART.search(value) else str(value)


_TABLES: Mapping[str, Mapping[str, Any]] = package_table("plan/keys.toml")


def plan_key(name: str, **more: Any) -> Any:
    """Return the dataclass field of the key that `keys.toml` describes under `name`. `more`: other fields of its `Key`.

    A whole number is by default at least 0 if its default is 0 or `auto`, else at least 1."""
    table = {**_TABLES[name], **more}
    if "pattern" in table:
        table["parse"] = functools.partial(
            matching, key=name, pattern=table.pop("pattern"), examples=tuple(table.pop("examples"))
        )
    table["words"] = words = tuple(table.get("words", ()))
    default = words[0] if words else table.pop("default")
    made = Key(**{"least": 0 if isinstance(default, str) else min(default, 1), **table})
    return dataclasses.field(default=made.read(default), metadata={"key": made})


@functools.cache
def keys_of(kind: type) -> Mapping[str, Key]:
    """Return the keys of the class `Plan` by name, in the order of declaration."""
    return MappingProxyType({item.name: item.metadata["key"] for item in dataclasses.fields(kind)})


TIERS = ("device", "cpu", "disk")
"""Memories that can store state between its uses; `cpu` is the host's memory."""
NO_OFFLOAD = "none"
"""Text of an `Offload` that stores all state on the device."""


@dataclass(frozen=True)
class Offload:
    """Tier of each part of a training's state, one of `TIERS`. Prints as a short text that `parse` reads back."""

    optimizer: str = "device"
    masters: str = "device"
    gradients: str = "device"
    params: str = "device"
    activations: str = "device"
    outer: str = "device"
    """Tier of what replicas keep between their agreements: the last agreed parameters, and the outer momentum."""

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """Return the tiers of the text `none`, or of words `state:tier` joined by commas. Raises PlanError.

        Other tiers follow from the given tiers: with `optimizer:cpu`, masters and gradients are on the CPU too."""
        given: dict[str, str] = {}
        for word in text.split(",") if text != NO_OFFLOAD else ():
            what, colon, tier = word.partition(":")
            if what not in OFFLOADABLE or not colon or tier not in TIERS:
                near = _near(what, OFFLOADABLE), _near(tier, TIERS[1:])
                raise PlanError(
                    f"offload={text}: {word!r} is not state:tier, of {' '.join(OFFLOADABLE)} and {' '.join(TIERS)}. "
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
        """Tiers of the state that an update needs: all except activations and `outer`."""
        return {self.optimizer, self.masters, self.gradients, self.params}

    @property
    def updates_on_cpu(self) -> bool:
        """True if the optimizer runs on the CPU, also when the device is a GPU."""
        return self.optimizer != "device"

    @property
    def uses_disk(self) -> bool:
        """True if any state is stored on disk; activations are not counted."""
        return "disk" in {*self.state_tiers, self.outer}


OFFLOADABLE = tuple(item.name for item in dataclasses.fields(Offload))
"""Names of the parts of the state that have a tier."""

WIRE_DTYPES = tuple(_TABLES["wire"]["words"])
WIRE_CODECS: Mapping[str, tuple[str, Callable[[float], bool]]] = MappingProxyType(
    {
        **dict.fromkeys(("int8", "int4", "fp8", "1bit"), ("", lambda _: False)),
        "qsgd": ("4", lambda bits: bits in (4, 8)),
        "powersgd": ("4", lambda rank: rank >= 1 and rank == int(rank)),
        "topk": ("0.01", lambda fraction: 0 < fraction <= 1),
    }
)
"""Values of `wire` that compress: name, an example of its number (empty: it has none), and the test of a number."""


@dataclass(frozen=True)
class Wire:
    """Value of `wire`: a dtype, or a codec of gradients with its number. Prints as the text from which it was read."""

    text: str
    codec: str = "none"
    """Name of the codec; `none` for a dtype."""
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Wire":
        """Return the value of a text such as `bf16` or `topk:0.01`. Raises PlanError for another text."""
        if text in WIRE_DTYPES:
            return cls(text)
        name, colon, number = text.partition(":")
        example, fits = WIRE_CODECS.get(name, ("", lambda _: False))
        if name in WIRE_CODECS and (not colon if not example else re.fullmatch(r"[0-9.e-]+", number)):
            with contextlib.suppress(ValueError):
                if not example or fits(float(number)):
                    return cls(text, name, float(number or 0))
        near = name if name in WIRE_CODECS else _near(name, (*WIRE_DTYPES, *WIRE_CODECS))
        hint = f"{near}:{WIRE_CODECS[near][0]}".rstrip(":") if near in WIRE_CODECS else near
        choices = f"{', '.join(WIRE_DTYPES)}, {_TABLES['wire']['form']}".replace("`", "")
        raise PlanError(f"wire={text}: wire is {choices}. Nearest that works: 'wire={hint}'")

    def __str__(self) -> str:
        return self.text


def _followed(given: dict[str, str]) -> dict[str, str]:
    """Return the tier of each part of the state: the given tiers, and the tiers that follow from them."""
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


def matching(text: str, *, key: str, pattern: str, examples: tuple[str, ...]) -> str:
    """Return `text` if it matches the regular expression `pattern`; else raise PlanError with the nearest example."""
    if re.fullmatch(pattern, text):
        return text
    raise PlanError(
        f"{key}={text} is none of {', '.join(examples)} (or another number). "
        f"Nearest that works: '{key}={_near(text, examples)}'"
    )


# An even number of quotes follows, so the place is not inside quotes.
_UNQUOTED = r'(?=(?:[^"]*"[^"]*")*[^"]*$)'
_BETWEEN = re.compile(rf"(?:[,;]?(?:\s+|$)|[,;](?=[-\w]+=)){_UNQUOTED}")
_EQUALS = re.compile(rf"\s*=\s*{_UNQUOTED}")


def read_words(text: str) -> dict[str, int | str]:
    """Return the values by key of `key=value` words, unchecked; numbers are int. Raises PlanError for other words."""
    values: dict[str, int | str] = {}
    if text.count('"') % 2:
        raise PlanError(f'a quote in the plan {text!r} is not closed; write " before and after a path with spaces')
    for word in filter(None, _BETWEEN.split(_EQUALS.sub("=", text))):
        name, equals, value = word.partition("=")
        if not equals:
            raise PlanError(f"{word!r} in the plan {text!r} is not key=value; write it as in 'dp=2 zero=1'")
        key = name.lower().replace("-", "_")
        given = {key: value}
        if key == "dp" and (found := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value)):
            given = {"dp": str(int(found[1]) * int(found[2])), "shards": found[2]}
        if twice := given.keys() & values.keys():
            raise PlanError(f"{min(twice)} is given twice in the plan {text!r}; keep one of them")
        for key, value in given.items():
            values[key] = int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else re.sub(r'^"([^"]*)"$', r"\1", value)
    return values


def check_keys(given: Iterable[str], *, known: Collection[str]) -> None:
    """Raise PlanError for the first unknown key, with the nearest known key."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6 if len(key) > 2 else 0.4)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {' '.join(known)}"
            raise PlanError(f"unknown plan key {key!r}; {hint}")
