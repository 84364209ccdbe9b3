"""Typed values from dotted flags, and from tables turned into dotted flags.

Two readers, one for a TOML file and one for flags, disagree about types, about unknown keys and about what an error
looks like. Here tyro is the one reader: a key of a table becomes the flag that it stands for,

    [train]                    --train.steps=10
    steps = 10                 --plan=dp=2
    plan = {dp = 2}

so that both take the same keys and give the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tomli_w
import tyro

from meshwise.plan import Plan, PlanError
from meshwise.train.job import JobError

T = TypeVar("T")
Key = tuple[str, ...]


def parse_flags(words: Sequence[str], *, prog: str, default: T) -> T:
    """`default`, a dataclass, changed by flags. Prints and exits with status 0 for `--help`.

    Raises JobError: what is wrong with which flag, and for an unknown one the nearest right one.
    """
    said = io.StringIO()
    try:
        with _stderr_in_hand(), contextlib.redirect_stderr(said):
            return tyro.cli(
                type(default), args=list(words), prog=prog, default=default, config=(tyro.conf.FlagConversionOff,)
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise JobError(_explained(_unboxed(said.getvalue()), default)) from None
    except PlanError as error:
        raise JobError(str(error)) from error


@functools.cache
def _stderr_in_hand() -> threading.Lock:
    """Who holds it may redirect stderr, which is the process's: ranks that are threads would leave it redirected."""
    return threading.Lock()


_stderr_in_hand()  # made here, where there is one thread


def flags_of(table: Mapping[str, Any], *, leaves: Collection[Key], prefix: Key = ()) -> Iterator[tuple[Key, list[str]]]:
    """Each key of a table with the words of its flag. `leaves` are the keys whose value is itself a mapping."""
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


def reason(error: JobError) -> str:
    """The message without the name of the flag, for a place that names the key itself."""
    return re.sub(r"^Error parsing [-.\w]+: ", "", str(error))


def _inline(value: Any) -> str:
    """The value as TOML writes it, on one line."""
    return " ".join(tomli_w.dumps({"x": value}).partition("=")[2].split("\n")).strip()


def _explained(message: str, default: Any) -> str:
    """The message; for an unknown flag, the nearest right one, also by its last word: `train.lr` is `optimizer.lr`."""
    unknown = re.match(r"Unrecognized options: --([-.\w]+)", message)
    if unknown is None:
        return message
    name = unknown[1].replace("-", "_")
    keys = [".".join(key) for key in _keys(default)]
    nearest = max(keys, key=lambda key: _likeness(key, name) + _likeness(key.split(".")[-1], name.split(".")[-1]))
    return f"unknown key {unknown[1]}; did you mean {nearest}?"


def _keys(value: Any, prefix: Key = ()) -> Iterator[Key]:
    """The keys of a tree of dataclasses."""
    for item in dataclasses.fields(value):
        inner = getattr(value, item.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Plan):
            yield from _keys(inner, (*prefix, item.name))
        else:
            yield (*prefix, item.name)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _unboxed(text: str) -> str:
    """The words of a message that tyro drew into a box, without its title, its frame and the pointer to --help.

    ╭─ title ─────╮        title
    │ words       │        ---------------
    │ ─────────── │ or     words
    │ more words  │        ---------------
    ╰─────────────╯        more words           where stdout takes no such characters
    """
    lines = [line.strip("│ ") for line in text.splitlines()]
    rule = re.compile(r"╭.*|[-─╰╯]{3,}")
    sections = [""]
    for line in lines:
        sections = [*sections, ""] if rule.fullmatch(line) else [*sections[:-1], f"{sections[-1]} {line}"]
    told = [" ".join(section.split()) for section in sections[1:]]
    kept = [part for part in told if part and not part.startswith(("For full help", "Argument help"))]
    return "\n  ".join(kept).partition(" Got errors: ")[0]
