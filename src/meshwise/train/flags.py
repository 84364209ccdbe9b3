"""Typed values from dotted flags, and from tables turned into dotted flags.

Two readers, one for a TOML file and one for flags, disagree about types, about unknown keys and about what an error
looks like. Here tyro is the one reader: a key of a table becomes the flag that it stands for,

    | [train]                    --train.steps=10
    | steps = 10                 --plan=dp=2
    | plan = {dp = 2}

so that both take the same keys and give the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tomli_w
import tyro

from meshwise.plan import Plan, PlanError
from meshwise.train.flag_errors import explained
from meshwise.train.job import JobError

T = TypeVar("T")
Key = tuple[str, ...]


def parse_flags(words: Sequence[str], *, prog: str, default: T) -> T:
    """`default`, a dataclass, changed by flags. Prints and exits with status 0 for `--help`.

    Raises JobError: what is wrong with which flag, and for an unknown one the nearest right one.
    """
    words, said = _spelled_out(words, default), io.StringIO()
    try:
        with _stderr_in_hand(), contextlib.redirect_stderr(said):
            return tyro.cli(
                type(default), args=words, prog=prog, default=default, config=(tyro.conf.FlagConversionOff,)
            )
    except SystemExit as end:
        if not end.code:
            raise
        known = [".".join(key) for key, _ in _leaves(default)]
        raise JobError(explained(said.getvalue(), words=words, keys=known)) from None
    except PlanError as error:
        raise JobError(str(error)) from None


@functools.cache
def _stderr_in_hand() -> threading.Lock:
    """Return the lock that must be held to redirect stderr: ranks that are threads share it."""
    return threading.Lock()


_stderr_in_hand()  # made here, where there is one thread


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
    return " ".join(tomli_w.dumps({"x": value}).partition("=")[2].split("\n")).strip()


def _spelled_out(words: Sequence[str], default: Any) -> list[str]:
    """`--write` for `--write=True`: what is asked for needs no value."""
    wishes = {f"--{'.'.join(key)}" for key, value in _leaves(default) if isinstance(value, bool)}
    followed = itertools.pairwise([*words, ""])
    return [
        f"{word}=True" if _flag(word) in wishes and after.lower() not in ("true", "false") else word
        for word, after in followed
    ]


def _flag(word: str) -> str:
    """Return a flag as its key is written: `--train.save-every` is `--train.save_every`."""
    return word[:2] + word[2:].replace("-", "_")


def _leaves(value: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the keys of a tree of dataclasses, with their values."""
    for item in dataclasses.fields(value):
        inner = getattr(value, item.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Plan):
            yield from _leaves(inner, (*prefix, item.name))
        else:
            yield (*prefix, item.name), inner
