"""Recompute blocks as the plan says or a budget allows, and hold the tier of activations and the compiled blocks.

docs/memory.md says how the modes follow from costs that are measured in the first steps ("A budget"). A block gets the
same mode on every rank that runs it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwise.base.text_format import align_columns
from meshwise.comm.api.world import World
from meshwise.memory.activation_offload import ActivationTier
from meshwise.memory.recompute import RecomputedBlock
from meshwise.memory.recompute_costs import MODES, RecomputeCost, choose_modes
from meshwise.model.compiled_blocks import CompiledBlocks
from meshwise.model.forward import Forward, ForwardReplay
from meshwise.model.parameter_units import Patterns, partition, select
from meshwise.plan import Plan, PlanError

MEASURED_STEPS = 2
"""Number of first steps in which blocks are measured. Two, because the first step is slow: it warms up."""

ALLOWED: Mapping[str, Sequence[str]] = {"none": MODES, "selective": ("none", "selective"), "full": ("none", "full")}
"""The modes that a budget may choose for a block, by the plan's `recompute`; see `recompute_costs.MODES`."""


class RecomputedBlocks:
    """The blocks of one rank that are recomputed, or may be under the plan's budget."""

    def __init__(self, plan: Plan, *, world: World, patterns: Patterns = ()) -> None:
        """`patterns`: names of the modules to recompute, each as a whole; by default the model's blocks."""
        self._plan = plan
        self._world = world
        self._patterns = patterns
        self._blocks: list[RecomputedBlock] = []
        self._in_flight: dict[str, float] = {}
        self.steps_to_measure = MEASURED_STEPS if plan.budget else 0
        """Number of coming steps in which blocks are still measured."""
        self.costs: dict[str, RecomputeCost] = {}
        """Measured costs of this rank's blocks, by block name; empty until the last measured step."""

    @property
    def modes(self) -> dict[str, str]:
        """Present mode of every block (`none`, `selective` or `full`), by block name."""
        return {block.name: block.mode for block in self._blocks}

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the modules to recompute in the whole model `module`.

        The list is empty if the plan neither recomputes nor has a budget. Raises PlanError if a model has no blocks."""
        if self._plan.recompute == "none" and not self._plan.budget:
            return []
        if self._patterns:
            return select(module, units=self._patterns)
        found = [piece.module for unit in partition(module) for piece in unit if piece.block]
        if not found:
            raise PlanError(
                f"the plan '{self._plan}' recomputes blocks, but {type(module).__name__} has no list or sequence of "
                "modules that contain modules. Name modules to recompute: Options(recomputed=('encoder.*', "
                "'decoder.*')), or leave out recompute and budget"
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

        | recall      restores the forward's state when a block's forward is repeated, and replays its kept results
        | in_flight   number of micro-batches whose activations a block keeps at most
        | parts       by block name, another name for a block of which `module` runs only a part, with its own cost"""
        modules = dict(module.named_modules())
        mode = "full" if self._plan.budget else self._plan.recompute
        for name in names:
            if name in modules and any(True for _ in modules[name].parameters()):
                block = RecomputedBlock(modules[name], name=parts.get(name, name), mode=mode, recall=recall)
                block.measures = self.steps_to_measure > 0
                self._blocks.append(block)
                self._in_flight[block.name] = in_flight

    def finish(self) -> None:
        """Count a measured step; after the last one exchange the costs, and choose and set the modes.

        Every rank calls it after each measured step. Raises PlanError if the budget cannot be met."""
        self.steps_to_measure -= 1
        if self.steps_to_measure:
            return
        found: dict[str, RecomputeCost] = {}
        for costs in self._world.exchange({block.name: block.cost for block in self._blocks if block.cost is not None}):
            for name, cost in costs.items():
                found[name] = cost if name not in found else found[name].merged(cost)
        blocks = {block.name: block for block in self._blocks if block.name in found}
        self.costs = {name: replace(found[name], in_flight=self._in_flight[name]) for name in blocks}
        self.set_modes(choose_modes(self.costs, budget=self._plan.budget, allowed=ALLOWED[self._plan.recompute]))
        for block in blocks.values():
            block.measures = False

    def set_modes(self, modes: Mapping[str, str]) -> None:
        """Set modes by block name, between two steps; ranks that run the same block must set the same mode."""
        for block in self._blocks:
            block.mode = modes.get(block.name, block.mode)

    def table(self) -> str:
        """Return a text table of the measured blocks: mode, MiB kept under it and under `none`, recompute seconds."""
        rows = [("block", "mode", "MiB kept", "of", "seconds again", "in flight")]
        for name, cost in self.costs.items():
            mode = self.modes[name]
            kept, of = (f"{cost.kept(one) / 2**20:.1f}" for one in (mode, "none"))
            rows.append((name, mode, kept, of, f"{cost.seconds[mode]:.4f}", f"{cost.in_flight:g}"))
        return align_columns(rows, left=2)

    def close(self) -> None:
        """Restore the forwards of the modules."""
        for block in self._blocks:
            block.close()


@dataclass(frozen=True)
class ActivationPolicy:
    """One rank's recomputed blocks, the tier of its activations, and its compiled blocks."""

    blocks: RecomputedBlocks
    activations: ActivationTier | None = None
    """None if activations stay on the device."""
    compiled: CompiledBlocks = field(default_factory=lambda: CompiledBlocks(backend=None))
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Callbacks that `close` runs last."""

    def with_offload(self, forward: Forward) -> Forward:
        """Return a forward that moves saved activations to their tier; `forward` itself if they stay on the device."""
        tier = self.activations
        if tier is None:
            return forward

        def run(model: nn.Module, batch: Any) -> Any:
            with tier.saving(model):
                return forward(model, batch)

        return run

    def memory(self) -> dict[str, int]:
        """Return the peak bytes of offloaded activations, under the key `cpu/activations` or `disk/activations`.

        Return {} if activations stay on the device."""
        tier = self.activations
        return {} if tier is None else {f"{tier.tier}/activations": tier.mover.peak}

    def close(self) -> None:
        """Restore the blocks' forwards, close the tier, and run the callbacks of `undo`."""
        self.blocks.close()
        if self.activations is not None:
            self.activations.mover.close()
        self.undo.close()
