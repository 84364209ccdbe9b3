"""What surrounds a model while it trains, beside what stores and runs it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from meshwise.memory.blocks import Blocks


@dataclass(frozen=True)
class Around:
    """The blocks that are recomputed, and what is to be taken off the model when training is over."""

    blocks: Blocks
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def finish(self) -> None:
        """A step is over; every rank calls it."""
        self.blocks.finish()

    def close(self) -> None:
        """Leave the model as it was."""
        self.blocks.close()
        self.undo.close()
