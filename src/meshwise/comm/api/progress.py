"""Values for the progress that a waiting rank makes on other calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias


class Progress(enum.IntEnum):
    """Progress of a waiting rank: nothing to do, something may arrive, or something was done."""

    NOTHING = 0
    LATER = 1
    DID = 2


Meanwhile: TypeAlias = Callable[[], Progress]
