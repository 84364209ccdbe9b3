"""Read a table that lies beside the source as a TOML file."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any


def package_table(path: str) -> Mapping[str, Any]:
    """Return the table of a TOML file of this package, as in `package_table("plan/keys.toml")`."""
    return tomllib.loads(resources.files("meshwise").joinpath(path).read_text(encoding="utf-8"))
