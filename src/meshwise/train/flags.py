"""Read typed values from dotted flags, and turn the tables of a TOML file into such flags.

tyro reads files and flags, so both accept the same keys and give the same messages:

    | [train]                    --train.steps=10
    | steps = 10                 --plan=dp=2
    | plan = {dp = 2}
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tomlkit
import tyro

from meshwise.plan import Plan, PlanError
from meshwise.train.job import JobError

T = TypeVar("T")
Key = tuple[str, ...]

_SIMILAR = 0.6
_SIMILAR_TWICE = 0.9
_TYRO_MESSAGES = (
    (r"(?:Error parsing )?(--[-.\w]+): invalid literal for int\(\) with base 10: (.+)", r"\1: \2 is no whole number"),
    (r"(?:Error parsing )?(--[-.\w]+): could not convert string to float: (.+)", r"\1: \2 is no number"),
    (r"invalid choice (.+) for argument '(--[-.\w]+)'\. Expected one of \((.+?),?\)\.", r"\2: \1 is none of \3"),
    (r"Missing value for argument '(--[-.\w]+)'\..*", r"\1 is given without a value"),
    (
        r"Error parsing (--[-.\w]+): no type matching \{None\}\|\{?(.+?)\}? could be .+ from \[(.+)\]\.",
        r"\1 takes \2, not \3",
    ),
    (r"Error parsing (--[-.\w]+: .+)", r"\1"),
    (r"Error parsing \w+: (.+)", r"\1"),
)
"""Patterns of tyro's messages, and the message to show instead."""


def parse_flags(words: Sequence[str], *, prog: str, default: T) -> T:
    """Return `default`, a dataclass, changed by flags. Prints and exits with status 0 for `--help`.

    Raises JobError that names the flag and what is wrong with it; for an unknown flag, the nearest known one.
    """
    words, output = _with_values(words, default), io.StringIO()
    try:
        with _stderr_lock(), contextlib.redirect_stderr(output):
            return tyro.cli(
                type(default), args=words, prog=prog, default=default, config=(tyro.conf.FlagConversionOff,)
            )
    except SystemExit as end:
        if not end.code:
            raise
        known = [".".join(key) for key, _ in _fields(default)]
        raise JobError(_explained(output.getvalue(), words, known)) from None
    except PlanError as error:
        raise JobError(str(error)) from None


@functools.cache
def _stderr_lock() -> threading.Lock:
    """Return the lock that a thread holds while it redirects stderr: ranks that are threads share it."""
    return threading.Lock()


_stderr_lock()  # made at import, where there is one thread


def flags_of(table: Mapping[str, Any], *, leaves: Collection[Key], prefix: Key = ()) -> Iterator[tuple[Key, list[str]]]:
    """Yield each key of a table with the words of its flag. `leaves` are the keys whose value is itself a mapping."""
    for name, value in table.items():
        key = (*prefix, name)
        flag = f"--{'.'.join(key)}"
        if key == ("plan",) and isinstance(value, dict):
            yield key, [f"{flag}={' '.join(f'{axis}={degree}' for axis, degree in value.items())}"]
        elif key in leaves and isinstance(value, dict):
            yield key, [flag, *(f"{argument}={_inline(item)}" for argument, item in value.items())]
        elif isinstance(value, dict):
            yield from flags_of(value, leaves=leaves, prefix=key)
        elif isinstance(value, list):
            yield key, [flag, *map(str, value)]
        else:
            yield key, [f"{flag}={value}"]


def _inline(value: Any) -> str:
    """Return the value as TOML writes it, on one line."""
    return str(tomlkit.item(value).as_string())


def _with_values(words: Sequence[str], default: Any) -> list[str]:
    """Return the words with `--write=True` for `--write`."""
    switches = {f"--{'.'.join(key)}" for key, value in _fields(default) if isinstance(value, bool)}
    return [
        f"{word}=True"
        if word[:2] + word[2:].replace("-", "_") in switches and after.lower() not in ("true", "false")
        else word
        for word, after in itertools.pairwise([*words, ""])
    ]


def _fields(value: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the keys of a tree of dataclasses, with their values."""
    for item in dataclasses.fields(value):
        inner = getattr(value, item.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Plan):
            yield from _fields(inner, (*prefix, item.name))
        else:
            yield (*prefix, item.name), inner


def without_flag(message: str) -> str:
    """Return the message without the leading name of the flag."""
    return re.sub(r"^--[-.\w]+: ", "", message)


def _explained(output: str, words: Sequence[str], keys: Collection[str]) -> str:
    """Return tyro's message about `words` in one line that names the flag; `keys` are the dotted keys there are."""
    message = _unboxed(output)
    if unknown := re.match(r"Unrecognized options: (\S+?)(?:[,\s]|$)", message):
        return _unknown_word(unknown[1], words, keys)
    for pattern, instead in _TYRO_MESSAGES:
        if re.fullmatch(pattern, message, re.DOTALL):
            return re.sub(pattern, instead, message, flags=re.DOTALL)
    return message


def _unknown_word(word: str, words: Sequence[str], keys: Collection[str]) -> str:
    """Return what to change about a word that is neither a flag nor a value of one."""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    if word.startswith("--"):
        nearest = max(keys, key=lambda key: _similarity(key, name))
        section, _, last = name.rpartition(".")
        if f"{section}.arguments" in keys and _ratio(nearest.split(".")[-1], last) < _SIMILAR:
            return f"unknown key {name}; give an argument of your own function as --{section}.arguments {last}=…"
        if section in keys and section.endswith((".arguments", ".tensor_rules")):
            return f"unknown key {name}; {section} is a table: give --{section} {last}=…"
        close = _similarity(nearest, name) > _SIMILAR_TWICE
        hint = f"did you mean {nearest}?" if close else f"there are {', '.join(keys)}"
        return f"unknown key {word[2:].partition('=')[0]}; {hint}"
    if name in keys:
        return f"{word!r} is no flag; did you mean '--{word.lstrip('-')}'?"
    if word.endswith(".toml"):
        return f"{word!r} comes after a flag; name one job, before all flags"
    place = [*words, word].index(word)
    flags = [index for index, before in enumerate(words[:place]) if before.startswith("--")]
    if not flags:
        return f"unexpected {word!r}; flags begin with --, as in --{next(iter(keys)).replace('_', '-')}"
    flag, _, value = words[flags[-1]].partition("=")
    value = " ".join(filter(None, [value, *words[flags[-1] + 1 : place + 1]]))
    return f'unexpected {word!r}; a value with blanks is written in quotes, as in {flag} "{value}"'


def _similarity(key: str, name: str) -> float:
    """Return the similarity of two dotted names, from 0 to 2: of the whole names plus of their last words."""
    return _ratio(key, name) + _ratio(key.rpartition(".")[-1], name.rpartition(".")[-1])


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _unboxed(text: str) -> str:
    """Return the words of a message that tyro has drawn into a box, without title, frame and the pointer to --help."""
    lines = [line.strip("│ ") for line in text.splitlines()]
    rule = re.compile(r"╭.*|[-─╰╯]{3,}")
    sections = [""]
    for line in lines:
        sections = [*sections, ""] if rule.fullmatch(line) else [*sections[:-1], f"{sections[-1]} {line}"]
    parts = [" ".join(section.split()) for section in sections[1:]]
    shown = [part for part in parts if part and not part.startswith(("For full help", "Argument help"))]
    return "\n  ".join(shown).partition(" Got errors: ")[0]
