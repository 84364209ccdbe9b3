"""Change keys of a TOML file and keep the rest of it, comments included.

The text is edited line by line and parsed again: without exactly the wanted values the file stays unchanged.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from meshwise.base.atomic_file import write_whole
from meshwise.train.job import JobError

_HEADER = re.compile(r"\s*\[")


def rewrite(path: Path, *, changes: Mapping[tuple[str, ...], Any]) -> None:
    """Set keys of a TOML file: `("plan",)` at the top, `("model", "cut_at")` in a table; None removes a key.

    Raises JobError, with the file unchanged, if its text cannot be changed so or it cannot be written.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for key, value in changes.items():
        lines = _with(lines, key, value)
    changed = "\n".join(lines) + "\n"
    wanted = tomllib.loads(text)
    for key, value in changes.items():
        _set(wanted, key, value)
    try:
        found: Any = tomllib.loads(changed)
    except tomllib.TOMLDecodeError as error:
        found = error
    if found != wanted:
        keys = "\n".join(f"  {'.'.join(key)} = {_value(value)}" for key, value in changes.items() if value is not None)
        raise JobError(f"{path} cannot be changed automatically and is unchanged. Write into it:\n{keys}")
    try:
        write_whole(path, write=lambda place: place.write_text(changed, encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}; it is unchanged") from error


def _with(lines: list[str], key: tuple[str, ...], value: Any) -> list[str]:
    """Return the lines with a key set, in its table."""
    *table, name = key
    start, stop = _table(lines, table)
    if start is None:
        if value is None:
            return lines
        return [*lines, "", f"[{'.'.join(table)}]", f"{name} = {_value(value)}"]
    place, end = _assignment(lines, name, start, stop)
    if place is None:
        added = [] if value is None else [f"{name} = {_value(value)}"]
        if table:
            at = max((number + 1 for number in range(start, stop) if lines[number].strip()), default=start)
        else:  # after the comment that the file begins with
            at = next((number for number in range(stop) if not lines[number].startswith("#")), stop)
        return [*lines[:at], *added, *lines[at:]]
    comment = re.search(r"\s+#[^\"']*$", lines[end - 1])
    line = [] if value is None else [f"{name} = {_value(value)}{comment.group() if comment else ''}"]
    return [*lines[:place], *line, *lines[end:]]


def _table(lines: list[str], table: list[str]) -> tuple[int | None, int]:
    """Return the first line and the end line of a table's keys."""
    start = None if table else 0
    for number, line in enumerate(lines):
        if _HEADER.match(line):
            if start is not None:
                return start, number
            if re.fullmatch(rf"\s*\[\s*{re.escape('.'.join(table))}\s*\]\s*(#.*)?", line):
                start = number + 1
    return start, len(lines)


def _assignment(lines: list[str], name: str, start: int, stop: int) -> tuple[int | None, int]:
    """Return the first and the end line of a key's assignment, which may take several lines."""
    for number in range(start, stop):
        if re.match(rf"\s*{re.escape(name)}\s*=", lines[number]):
            for end in range(number + 1, stop + 1):
                try:
                    tomllib.loads("\n".join(lines[number:end]))
                except tomllib.TOMLDecodeError:
                    continue
                return number, end
    return None, stop


def _value(value: Any) -> str:
    """Return a value in TOML, on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one) for one in value)}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _set(table: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    for name in key[:-1]:
        table = table.setdefault(name, {})
    if value is None:
        table.pop(key[-1], None)
    else:
        table[key[-1]] = list(value) if isinstance(value, tuple) else value
