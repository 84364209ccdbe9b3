"""Attribute and argument names by which attentions are recognised, and functions of dotted module names.

`attention_names.toml` has the names, and says what each list is for."""

from collections.abc import Mapping
from typing import Any

from meshwise.base.package_table import package_table

_NAMES: Mapping[str, Any] = package_table("tensor/detect/attention_names.toml")

HEADS, KEY_HEADS, GROUPS, TABLES = (tuple(_NAMES[key]) for key in ("heads", "key_heads", "groups", "tables"))
HEAD_WIDTHS, FEATURES, CONFIGURATIONS = (tuple(_NAMES[key]) for key in ("head_widths", "features", "configurations"))
BY_HEAD, MASKS, STORED_AS_INPUTS_BY_OUTPUTS = (tuple(_NAMES[key]) for key in ("by_head", "masks", "inputs_by_outputs"))
DECLARED: Mapping[str, str | None] = {word: role or None for word, role in _NAMES["declared"].items()}


def enclosing(name: str) -> list[str]:
    """Return the names of the modules around `name`, innermost first; the last name is "", which is the model."""
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(len(words) - 1, -1, -1)]


def full_name(kind: type) -> str:
    """Return the dotted name of a class, with its Python module."""
    return f"{kind.__module__}.{kind.__qualname__}"
