"""Choose which blocks are recomputed, and the tier of the other activations.

A budget is met by measured costs. In the first steps every block recomputes everything, which takes the least memory,
and measures what it would keep and save in the other modes. Then each block is given its mode, the same on every rank
that runs the block. No mode changes a number, so these steps count like all others.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwise.comm.api.world import World
from meshwise.memory.activation_offload import ActivationTier
from meshwise.memory.recompute import RecomputedBlock
from meshwise.memory.recompute_cost import MODES, RecomputeCost, choose_modes
from meshwise.model.blocks import Patterns, partition, select
from meshwise.model.forward import Forward
from meshwise.model.forward_replay import ForwardReplay
from meshwise.plan import Plan, PlanError

MEASURED_STEPS = 2
"""Steps in which blocks are measured. The first one alone is slow: it warms up."""

ALLOWED: Mapping[str, Sequence[str]] = {
    "none": MODES,
    "selective": ("none", "selective"),
    "full": ("none", "full"),
}
"""What a budget may choose, by the plan's `recompute`."""


class RecomputedBlocks:
    """The blocks of one rank that are or may be recomputed."""

    def __init__(self, plan: Plan, *, world: World, patterns: Patterns = ()) -> None:
        """`patterns` name the modules that are recomputed as one; by default they are the model's blocks."""
        self._plan = plan
        self._world = world
        self._patterns = patterns
        self._blocks: list[RecomputedBlock] = []
        self._in_flight: dict[str, float] = {}
        self.steps_to_measure = MEASURED_STEPS if plan.budget else 0
        """Number of steps that are still to be measured."""
        self.costs: dict[str, RecomputeCost] = {}

    @property
    def modes(self) -> dict[str, str]:
        """The mode of every block, by name."""
        return {block.name: block.mode for block in self._blocks}

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the modules of a whole model to recompute; none when the plan recomputes nothing.

        Raises PlanError for a model without blocks.
        """
        if self._plan.recompute == "none" and not self._plan.budget:
            return []
        if self._patterns:
            return list(select(module, units=self._patterns))
        found = [piece.module for unit in partition(module) for piece in unit if piece.block]
        if not found:
            raise PlanError(
                f"the plan '{self._plan}' recomputes blocks, and {type(module).__name__} has none that its structure "
                "shows: modules with modules inside, in a list or sequence. Name modules to recompute: "
                "Options(recomputed=('encoder.*', 'decoder.*')), or leave out recompute and budget"
            )
        return found

    def install(
        self,
        module: nn.Module,
        *,
        names: Sequence[str],
        recall: ForwardReplay,
        in_flight: float = 1.0,
        parts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Recompute the blocks `names` of `module`, the part of the model that this rank runs.

        | in_flight   number of micro-batches whose activations a block keeps at most
        | parts       other names for blocks of which `module` runs only a part: each has its own cost
        """
        modules = dict(module.named_modules())
        mode = "full" if self._plan.budget else self._plan.recompute
        for name in names:
            if name in modules and any(True for _ in modules[name].parameters()):
                block = RecomputedBlock(modules[name], name=parts.get(name, name), mode=mode, recall=recall)
                block.measures = self.steps_to_measure > 0
                self._blocks.append(block)
                self._in_flight[block.name] = in_flight

    def finish(self) -> None:
        """Count a finished step, and choose the modes after the last measured one. Every rank calls it.

        Raises PlanError when a budget cannot be met.
        """
        self.steps_to_measure -= 1
        if self.steps_to_measure:
            return
        found: dict[str, RecomputeCost] = {}
        for costs in self._world.exchange({block.name: block.cost for block in self._blocks}):
            for name, cost in costs.items():
                if cost is not None:
                    found[name] = cost if name not in found else found[name].merged(cost)
        blocks = {block.name: block for block in self._blocks if block.name in found}
        self.costs = {
            name: RecomputeCost(found[name].bytes, found[name].seconds, self._in_flight[name]) for name in blocks
        }
        self.set_modes(choose_modes(self.costs, budget=self._plan.budget, allowed=ALLOWED[self._plan.recompute]))
        for block in blocks.values():
            block.measures = False

    def set_modes(self, modes: Mapping[str, str]) -> None:
        """Set the modes of blocks by name, between two steps. Ranks that run the same block must choose the same."""
        for block in self._blocks:
            block.mode = modes.get(block.name, block.mode)

    def table(self) -> str:
        """Return a table as text: what each block keeps, what it would keep, and the seconds of its recomputation."""
        rows = [("block", "mode", "MiB kept", "of", "seconds again", "in flight")]
        for name, cost in self.costs.items():
            mode = self.modes[name]
            kept, of = (f"{cost.kept(one) / 2**20:.1f}" for one in (mode, "none"))
            rows.append((name, mode, kept, of, f"{cost.seconds[mode]:.4f}", f"{cost.in_flight:g}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)

    def close(self) -> None:
        """Give the modules their own forwards back."""
        for block in self._blocks:
            block.close()


@dataclass(frozen=True)
class ActivationPolicy:
    """The blocks that are recomputed, the tier of activations, and what `close` undoes."""

    blocks: RecomputedBlocks
    activations: ActivationTier | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def with_offload(self, forward: Forward) -> Forward:
        """Return the forward so that it saves activations to their tier."""
        tier = self.activations
        if tier is None:
            return forward

        def run(model: nn.Module, batch: Any) -> Any:
            with tier.saving(model):
                return forward(model, batch)

        return run

    def memory(self) -> dict[str, int]:
        """Return the most bytes of activations that were in another tier at one time."""
        tier = self.activations
        return {} if tier is None else {f"{tier.tier}/activations": tier.mover.peak}

    def close(self) -> None:
        """Leave the model as it was."""
        self.blocks.close()
        if self.activations is not None:
            self.activations.mover.close()
        self.undo.close()
