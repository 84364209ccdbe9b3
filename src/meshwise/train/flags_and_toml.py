"""Read typed values from dotted flags (`parse_flags`), and a job from a TOML file and flags (`read_job`, `from_toml`).

tyro parses the flags in both cases, so a TOML file and a command line accept the same keys with the same messages. The
file's values become the defaults of the flags. So a flag overrides the file, and `--help` shows the file's values."""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import re
import threading
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
import tyro

from meshwise.base.atomic_file import write_whole
from meshwise.plan import Plan, PlanError
from meshwise.train.job_settings import Job, JobError, StudiedJob, as_job_error

T = TypeVar("T")
Key = tuple[str, ...]
"""A dotted key in parts: `("train", "steps")` is `train.steps`."""

_PYTHON_MESSAGES: Mapping[str, str] = {
    "invalid literal for int() with base 10:": "not a whole number:",
    "could not convert string to float:": "not a number:",
}


def parse_flags(words: Sequence[str], *, prog: str, default: T) -> T:
    """Return a copy of the dataclass `default` with the flags' values. `prog`: name of the program in the help text.

    For `--help` it prints the help and exits with status 0. Raises JobError with the wrong flag and a similar one."""
    output = io.StringIO()
    try:
        with _stderr_lock(), contextlib.redirect_stderr(output):
            return tyro.cli(type(default), args=words, prog=prog, default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise JobError(_explain(output.getvalue(), keys=[".".join(key) for key, _ in _fields(default)])) from None
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
    if not isinstance(value, dict):
        return str(tomlkit.item(value).as_string())
    return f"{{{', '.join(f'{tomlkit.key(key).as_string()} = {_one_line(item)}' for key, item in value.items())}}}"


def _fields(value: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield key and value of each field of a dataclass and of the dataclasses in it; a Plan is a single value."""
    for item in dataclasses.fields(value):
        key, inner = (*prefix, item.name), getattr(value, item.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Plan):
            yield from _fields(inner, key)
        else:
            yield key, inner


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
        if "model.name" not in keys:
            return f"{word!r}: this command reads no job file; give its flags: {' '.join(f'--{key}' for key in keys)}"
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
    words = [line.strip("─-╰╯") and line for line in lines]
    return " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, words)))


J = TypeVar("J", bound=Job)


def read_job(arguments: Sequence[str], *, prog: str, kind: type[J]) -> J:
    """Return the job of a command line: an optional TOML file, then dotted flags.

    `kind`: class of the job, Job or a subclass with more fields. For `--help` it prints the help and exits with status
    0. Raises JobError that names the wrong flag, or the file and the wrong key."""
    flags = list(arguments)
    job = kind()
    if flags and not flags[0].startswith("-"):
        job = from_toml(Path(flags.pop(0)), kind=kind)
    return _merge(job, parse_flags(flags, prog=f"{prog} [JOB.toml]", default=job))


def from_toml(path: Path, *, kind: type[J]) -> J:
    """Return the job of a TOML file, of class `kind`. Raises JobError that names the file and every wrong key."""
    try:
        with as_job_error(of=f"{path} is not TOML: "):
            text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot read the job {path}: {error.strerror}") from error
    return from_text(text, source=str(path), kind=kind)


def from_text(text: str, *, source: str, kind: type[J]) -> J:
    """Return the job of a TOML text, of class `kind`. Raises JobError that names `source` and every wrong key."""
    with as_job_error(of=f"{source} is not TOML: "):
        table = tomllib.loads(text)
    if issubclass(kind, StudiedJob):
        table.pop("restarts", None)
    flags = dict(flags_of(table, leaves=_mappings(kind())))
    try:
        return parse_flags([word for words in flags.values() for word in words], prog=source, default=kind())
    except JobError as error:
        problems = [problem for key in flags if (problem := _problem(".".join(key), flags[key], kind))] or [str(error)]
        raise JobError("\n".join(f"{source}: {problem}" for problem in problems)) from error


def to_toml(job: Job) -> str:
    """Return the job as TOML text, without fields that are None. `from_text` reads an equal job from the text."""
    return tomlkit.dumps(_table(job))


def change_file(path: Path, *, changes: Mapping[Key, Any]) -> None:
    """Set keys of a TOML file, such as `("plan",)` or `("model", "cut_at")`; the value None removes a key. Comments
    stay. Raises JobError when the file cannot be written; the file then stays unchanged."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for (*tables, name), value in changes.items():
        table: Any = document
        for key in tables:
            table = table.setdefault(key, tomlkit.table())
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    try:
        write_whole(path, write=lambda place: place.write_text(tomlkit.dumps(document), encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}; it is unchanged") from error


def _table(value: Any) -> Any:
    if isinstance(value, Plan):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {name: _table(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [_table(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _mappings(job: Job) -> set[Key]:
    """Return the keys of a job whose value is a mapping, such as `("model", "arguments")`."""
    return {key for key, value in _fields(job) if isinstance(value, Mapping)}


def _problem(key: str, words: list[str], kind: type[Job]) -> str | None:
    """Return the error message for one key, parsed alone; None if the key is right."""
    try:
        parse_flags(words, prog="job", default=kind())
    except JobError as error:
        message = str(error).removeprefix("--")
        return message if key in message else f"{key}: {message}"
    return None


def _merge(base: J, job: J) -> J:
    """Return `job` with those arguments of `base` that it lacks: a flag sets one argument, not the whole table."""
    for section, name in _mappings(job):
        given = [getattr(getattr(one, section), name) for one in (base, job)]
        job = job.changed(**{section: {name: {**given[0], **given[1]}}})
    return job
