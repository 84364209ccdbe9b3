"""Read typed values from dotted command-line flags (`parse_flags`), and turn TOML tables into such flags (`flags_of`).

tyro parses the flags in both cases, so a TOML file and a command line accept the same keys with the same messages:

    | [train]                    --train.steps=10
    | steps = 10                 --plan=dp=2
    | plan = {dp = 2}"""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import tomlkit
import tyro

from meshwise.plan import Plan, PlanError
from meshwise.train.job import JobError

T = TypeVar("T")
Key = tuple[str, ...]
"""A dotted key in parts: `("train", "steps")` is `train.steps`."""

_PYTHON_MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        "invalid literal for int() with base 10:": "not a whole number:",
        "could not convert string to float:": "not a number:",
    }
)


def parse_flags(words: Sequence[str], *, prog: str, default: T) -> T:
    """Return a copy of the dataclass `default` with the flags' values. `prog`: name of the program in the help text.

    For `--help` it prints the help and exits with status 0. Raises JobError that names a wrong flag and a similar one.
    """
    output = io.StringIO()
    try:
        with _stderr_lock(), contextlib.redirect_stderr(output):
            return tyro.cli(type(default), args=words, prog=prog, default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise JobError(_explain(output.getvalue(), keys=[".".join(key) for key in _keys(default)])) from None
    except PlanError as error:
        raise JobError(str(error)) from None


@functools.cache
def _stderr_lock() -> threading.Lock:
    """Return the lock that a thread holds while it redirects stderr, which ranks in threads of a process share."""
    return threading.Lock()


_stderr_lock()  # makes the lock at import, when there is only one thread


def flags_of(table: Mapping[str, Any], *, leaves: Collection[Key], prefix: Key = ()) -> Iterator[tuple[Key, list[str]]]:
    """Yield each key of a TOML table, with the words of the flag that sets the key. `prefix`: key of the table itself.
    A table whose key is in `leaves` is one value, not a section: its flag is `--key name=value …`."""
    for name, value in table.items():
        key = (*prefix, name)
        flag = f"--{'.'.join(key)}"
        if key == ("plan",) and isinstance(value, dict):
            yield key, [f"{flag}={' '.join(f'{axis}={degree}' for axis, degree in value.items())}"]
        elif key in leaves and isinstance(value, dict):
            yield key, [flag, *(f"{argument}={_one_line(item)}" for argument, item in value.items())]
        elif isinstance(value, dict):
            yield from flags_of(value, leaves=leaves, prefix=key)
        elif isinstance(value, list):
            yield key, [flag, *map(str, value)]
        elif isinstance(value, bool):
            yield key, [flag if value else f"--{'.'.join((*prefix, f'no-{name}'))}"]
        else:
            yield key, [f"{flag}={value}"]


def _one_line(value: Any) -> str:
    """Return a value as TOML on one line."""
    if not isinstance(value, dict):
        return str(tomlkit.item(value).as_string())
    return f"{{{', '.join(f'{tomlkit.key(key).as_string()} = {_one_line(item)}' for key, item in value.items())}}}"


def _keys(value: Any, prefix: Key = ()) -> Iterator[Key]:
    """Yield the keys of all fields of a dataclass and of the dataclasses in it; a Plan is a single value."""
    for item in dataclasses.fields(value):
        inner = getattr(value, item.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Plan):
            yield from _keys(inner, (*prefix, item.name))
        else:
            yield (*prefix, item.name)


def _explain(output: str, *, keys: Collection[str]) -> str:
    """Return one line that names the flag, from tyro's error output. `keys`: the known dotted keys."""
    message = re.sub(r"^Error parsing (?:[\w.]+: )?", "", _first_paragraph(output))
    if unknown := re.match(r"Unrecognized options: (\S+?)(?:[,\s]|$)", message):
        return _explain_unknown(unknown[1], keys)
    for python, plain in _PYTHON_MESSAGES.items():
        message = message.replace(python, plain)
    return message


def _explain_unknown(word: str, keys: Collection[str]) -> str:
    """Return what to change about a word that is neither a flag nor the value of a flag."""
    if word.endswith(".toml"):
        return f"{word!r} comes after a flag; name one job file, before all flags"
    if not word.startswith("--"):
        example = '--plan "dp=2 zero=1"'
        return f"unexpected {word!r}; flags begin with --, and a value with blanks is quoted, as in {example}"
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    section, _, last = name.rpartition(".")
    by_last_word = {key.rpartition(".")[-1]: key for key in keys}
    if near := difflib.get_close_matches(last, by_last_word, n=1, cutoff=0.65):
        hint = f"did you mean {by_last_word[near[0]]}?"
    elif f"{section}.arguments" in keys:
        hint = f"give an argument of your own function as --{section}.arguments {last}=…"
    elif section in keys:
        hint = f"{section} is a table: give --{section} {last}=…"
    else:
        hint = f"the keys are {', '.join(keys)}"
    return f"unknown key {name}; {hint}"


def _first_paragraph(text: str) -> str:
    """Return the first paragraph of a message that tyro has printed in a box, without the title of the box."""
    lines = (line.strip("│ ") for line in text.splitlines()[1:])
    return " ".join(itertools.takewhile(_has_words, itertools.dropwhile(lambda line: not _has_words(line), lines)))


def _has_words(line: str) -> bool:
    return bool(line.strip("─-╰╯"))
