"""Result of watching a model run: its steps, their dependencies and costs."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Any

from torch import nn

from meshwise.pipeline.cut.dataflow import Dependencies


@dataclass(frozen=True)
class StepCost:
    """Cost of a step."""

    activations: float
    """Bytes that the forward keeps for the backward."""
    work: float
    """Forward and backward: seconds, or on the meta device floating-point operations; 0 if not measured."""
    between: float = 0.0
    """Inside of a block: forward of the block's own code between the previous step and this one; `work` includes it."""
    earlier: float = 0.0
    """Inside of a block: forward of the block's own code before the previous step."""


@dataclass(frozen=True)
class ProbedStep:
    """One call of one piece."""

    key: str
    """The piece's name, with a number from its second call on."""
    module: str
    """The piece's name in the model."""
    parameters: tuple[str, ...]
    """First names of the parameters it uses."""
    dependencies: Dependencies
    """Dependencies of its inputs."""
    output: int
    """Bytes that it returns."""
    cost: StepCost
    same_shape: bool = False
    """Whether it returns one tensor with the shape and dtype of its first input, as blocks do with hidden states."""
    inside: "tuple[ProbedStep, ...]" = ()
    """Steps of a block that can be opened: its modules, and last, under the block's own key, the rest of its code."""

    def parts(self) -> "Iterator[ProbedStep]":
        """Yield the steps inside, with costs that add up to the cost of the block."""
        kept = self.cost.activations / (sum(step.cost.activations for step in self.inside) or 1.0)
        worked = self.cost.work / (sum(step.cost.work for step in self.inside) or 1.0)
        earlier = 0.0
        for step in self.inside:
            between = step.cost.between * worked if step is not self.inside[0] else 0.0
            cost = StepCost(step.cost.activations * kept, step.cost.work * worked, between, earlier)
            yield dataclasses.replace(step, cost=cost)
            earlier += step.cost.between * worked


@dataclass(frozen=True)
class ProbeResult:
    """Everything that a cut needs to know of a model."""

    steps: tuple[ProbedStep, ...]
    """The calls, in order."""
    result: Dependencies
    """Dependencies of the result."""
    everywhere: tuple[str, ...]
    """Parameters that the model uses outside of its pieces; every stage needs them."""
    changed: frozenset[str]
    """The steps whose outputs are then changed in place."""
    changed_buffers: Collection[str] = ()
    """Buffers outside of the pieces that the model changes."""
    tail: float = 0.0
    """Seconds of forward and backward after the last step, as of the loss; 0 if not measured."""

    def opened(self, keys: Collection[str]) -> "ProbeResult":
        """Return the steps with these blocks opened, where they can be."""
        steps = (
            part for step in self.steps for part in (step.parts() if step.key in keys and step.inside else (step,))
        )
        return dataclasses.replace(self, steps=tuple(steps))

    def begins(self, keys: Collection[str]) -> dict[str, int]:
        """Return the place of each step once these blocks are opened, except for their last inner steps."""
        found: dict[str, int] = {}
        place = 0
        for step in self.steps:
            parts = step.inside if step.key in keys else ()
            found[step.key] = place
            found |= {part.key: place + number for number, part in enumerate(parts[:-1])}
            place += len(parts) or 1
        return found

    def ends(self, keys: Collection[str]) -> frozenset[int]:
        """Return the places of the last inner steps of these blocks once they are opened."""
        steps = self.opened(keys).steps
        return frozenset(place for place, step in enumerate(steps) if step.key in keys)

    def crossing(self, position: int) -> tuple[str, ...]:
        """Return the steps whose outputs cross a cut before step `position`."""
        return tuple(
            step.key for step, last in zip(self.steps[:position], self._last, strict=False) if last >= position
        )

    def effect(self, position: int) -> tuple[str, str] | None:
        """Return a step before a cut with a side effect, and the step after it that needs the effect, if any."""
        before = [step.key for step in self.steps[:position]]
        after = [(step.key, step.dependencies) for step in self.steps[position:]]
        for name, past in (*after, ("the result", self.result)):
            for key in sorted(past.effects):
                if any(key == one or key.startswith(f"{one}.") for one in before):
                    return key, name
        return None

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """Bytes that would cross a cut before each step."""
        change = [0.0] * (len(self.steps) + 2)
        for place, (step, last) in enumerate(zip(self.steps, self._last, strict=True)):
            if last > place:
                change[place + 1] += step.output
                change[last + 1] -= step.output
        return tuple(accumulate(change))[: len(self.steps)]

    @cached_property
    def _last(self) -> tuple[int, ...]:
        """For each step, the last step that needs its output; the number of steps if the result does."""
        places = {step.key: place for place, step in enumerate(self.steps)}
        last = list(range(len(self.steps)))
        for place, step in enumerate(self.steps):
            for key in step.dependencies.needs:
                last[places[key]] = place
        for key in self.result.needs:
            last[places[key]] = len(self.steps)
        return tuple(last)


def typical(runs: Sequence[ProbeResult], *, model: nn.Module) -> ProbeResult:
    """Return the first of several runs of one model, each step with the median work of all equal steps.

    Equal steps (blocks of one kind) do the same work; their times differ because the machine was disturbed. The minimum
    would favour kinds with many steps: the more measurements, the smaller their minimum.
    """
    found: dict[Any, list[StepCost]] = {}
    for run in runs:
        for kind, step in _kinds(run.steps, model):
            found.setdefault(kind, []).append(step.cost)
    medians = {
        kind: StepCost(some[0].activations, median(one.work for one in some), median(one.between for one in some))
        for kind, some in found.items()
    }

    def with_medians(steps: Sequence[ProbedStep], *within: Any) -> tuple[ProbedStep, ...]:
        return tuple(
            dataclasses.replace(step, cost=medians[kind], inside=with_medians(step.inside, *kind))
            for kind, step in _kinds(steps, model, *within)
            if kind[:-1] == within
        )

    return dataclasses.replace(runs[0], steps=with_medians(runs[0].steps), tail=median(run.tail for run in runs))


def _kinds(steps: Sequence[ProbedStep], model: nn.Module, *within: Any) -> Iterator[tuple[Any, ProbedStep]]:
    """Yield (kind, step) for each step and for those inside of blocks; equal steps have one kind."""
    for place, step in enumerate(steps):
        module = type(model.get_submodule(step.module))
        shapes = tuple(model.get_parameter(name).shape for name in step.parameters)
        kind = (*within, (module, shapes, step.output, step.cost.activations, place if within else 0))
        yield kind, step
        yield from _kinds(step.inside, model, *kind)
