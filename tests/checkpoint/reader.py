"""The reader of docs/checkpoints.md, as it stands there: the code block of that page is run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

_PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
[_CODE] = re.findall(r"```python\n(import json.*?)```", _PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def read(folder: Path) -> dict[str, Tensor]:
    """All logical tensors of a checkpoint, whole."""
    names: dict[str, Any] = {}
    exec(_CODE, names)
    reader: Callable[[Path], dict[str, Tensor]] = names["read"]
    return reader(folder)
