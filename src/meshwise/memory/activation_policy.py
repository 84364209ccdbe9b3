"""Activation policy of a training: recomputed blocks, the tier of activations, and notes on memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwise.memory.activation_offload import ActivationTier
from meshwise.memory.recomputed_blocks import RecomputedBlocks
from meshwise.model.forward import Forward


@dataclass(frozen=True)
class ActivationPolicy:
    """The blocks that are recomputed, the tier of activations, and what is taken off when training is over."""

    blocks: RecomputedBlocks
    activations: ActivationTier | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def saved(self, forward: Forward) -> Forward:
        """Return the forward, with what it saves for its backward in its tier."""
        tier = self.activations
        if tier is None:
            return forward

        def run(model: nn.Module, batch: Any) -> Any:
            with tier.saving(model):
                return forward(model, batch)

        return run

    def memory(self) -> dict[str, int]:
        """Return the most bytes of activations that were in another tier at one time."""
        return {} if self.activations is None else {f"{self.activations.tier}/activations": self.activations.peak}

    def finish(self) -> None:
        """Finish a step; every rank calls it."""
        self.blocks.finish()

    def close(self) -> None:
        """Leave the model as it was."""
        self.blocks.close()
        if self.activations is not None:
            self.activations.close()
        self.undo.close()
