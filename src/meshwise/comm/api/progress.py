"""What a rank that waits could do instead: its part in other calls, for which others may be waiting."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias


class Progress(enum.IntEnum):
    """It has nothing to do, or something may come up, or it did something."""

    NOTHING = 0
    LATER = 1
    DID = 2


Meanwhile: TypeAlias = Callable[[], Progress]
