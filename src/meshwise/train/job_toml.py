"""Read a job from a TOML file and dotted flags (`read_job`, `from_toml`, `from_text`), write it (`to_toml`), and change
its file (`change_file`).

The values of the file become the defaults of the flags, so a flag wins and `--help` shows the values of the file.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomlkit

from meshwise.base.atomic_file import write_whole
from meshwise.plan import Plan
from meshwise.train.flags import Key, flags_of, parse_flags
from meshwise.train.job import Job, JobError

J = TypeVar("J", bound=Job)


def read_job(arguments: Sequence[str], *, prog: str, kind: type[J]) -> J:
    """Return the job of a command line: an optional TOML file, then dotted flags.

    `kind` is Job or a frozen dataclass that adds fields to it. Prints and exits with status 0 for `--help`. Raises
    JobError that names the flag, or the file and its key.
    """
    flags = list(arguments)
    job = kind()
    if flags and not flags[0].startswith("-"):
        job = from_toml(Path(flags.pop(0)), kind=kind)
    return _merge(job, parse_flags(flags, prog=f"{prog} [JOB.toml]", default=job))


def from_toml(path: Path, *, kind: type[J]) -> J:
    """Return the job of a TOML file. Raises JobError that names the file and every wrong key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot read the job {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    return from_text(text, source=str(path), kind=kind)


def from_text(text: str, *, source: str, kind: type[J]) -> J:
    """Return the job of a TOML text. Raises JobError that names `source` and every wrong key."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source} is not TOML: {error}") from error
    flags = {key: words for key, words in flags_of(table, leaves=_mappings(kind)) if key not in kind.ignored_keys}
    try:
        return parse_flags([word for words in flags.values() for word in words], prog=source, default=kind())
    except JobError as error:
        problems = [problem for key in flags if (problem := _problem(".".join(key), flags[key], kind))] or [str(error)]
        raise JobError("\n".join(f"{source}: {problem}" for problem in problems)) from error


def to_toml(job: Job) -> str:
    """Return the TOML text that `from_toml` reads back as the same job. A field that is None is left out."""
    return tomlkit.dumps(_table(job))


def change_file(path: Path, *, changes: Mapping[Key, Any]) -> None:
    """Set keys of a TOML file: `("plan",)` at the top, `("model", "cut_at")` in a table; None removes a key. Comments
    stay. Raises JobError, with the file unchanged, if it cannot be written.
    """
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


def _mappings(kind: type, prefix: Key = ()) -> set[Key]:
    """Return the keys of a job whose value is itself a mapping: the arguments of something the job names."""
    keys: set[Key] = set()
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is Mapping:
            keys.add((*prefix, name))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Plan:
            keys |= _mappings(hint, (*prefix, name))
    return keys


def _problem(key: str, words: list[str], kind: type[Job]) -> str | None:
    """Return what is wrong with one key on its own, if anything."""
    try:
        parse_flags(words, prog="job", default=kind())
    except JobError as error:
        message = str(error).removeprefix("--")
        return message if key in message else f"{key}: {message}"
    return None


def _merge(base: J, job: J) -> J:
    """Return `job` plus the arguments that only `base` has: a flag changes one argument, not the whole table."""
    for section, name in _mappings(type(job)):
        own = getattr(job, section)
        arguments = {**getattr(getattr(base, section), name), **getattr(own, name)}
        job = dataclasses.replace(job, **{section: dataclasses.replace(own, **{name: arguments})})
    return job
