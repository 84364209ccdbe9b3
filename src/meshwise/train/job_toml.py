"""Read a job from a TOML file and command-line flags, write a job as TOML, and change single keys of a TOML file.

The file's values become the defaults of the flags. So a flag overrides the file, and `--help` shows the file's values.
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
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot read the job {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    return from_text(text, source=str(path), kind=kind)


def from_text(text: str, *, source: str, kind: type[J]) -> J:
    """Return the job of a TOML text, of class `kind`. Raises JobError that names `source` and every wrong key."""
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


def _mappings(kind: type, prefix: Key = ()) -> set[Key]:
    """Return the keys of a job whose value is a mapping, such as `("model", "arguments")`."""
    keys: set[Key] = set()
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is Mapping:
            keys.add((*prefix, name))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Plan:
            keys |= _mappings(hint, (*prefix, name))
    return keys


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
    for section, name in _mappings(type(job)):
        own = getattr(job, section)
        arguments = {**getattr(getattr(base, section), name), **getattr(own, name)}
        job = dataclasses.replace(job, **{section: dataclasses.replace(own, **{name: arguments})})
    return job
