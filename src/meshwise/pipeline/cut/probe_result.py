"""Results of a watched run of a model: its steps, their dependencies and costs."""

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
    """Bytes that its forward keeps for its backward."""
    work: float
    """Of its forward and backward: seconds, or without values floating-point operations; 0 where nobody asked."""
    between: float = 0.0
    """Inside of a block: the forward of what the block itself does before this step, and after the one before; `work`
    has it too."""
    earlier: float = 0.0
    """Inside of a block: the same of all that is before them."""


@dataclass(frozen=True)
class ProbedStep:
    """One call of one piece."""

    key: str
    """The piece's name, with a number from its second call on."""
    module: str
    """The piece's name in the model."""
    parameters: tuple[str, ...]
    """First names of the parameters it uses."""
    past: Dependencies
    """What it is given was made of."""
    output: int
    """Bytes that it returns."""
    took: StepCost
    """What it took."""
    alike: bool = False
    """Whether it returns one tensor, of the shape and dtype of the first that it is given, as blocks of hidden states
    do."""
    inside: "tuple[ProbedStep, ...]" = ()
    """Of a block that can be opened, its steps: the modules in it, and under the block's own key what it does last."""

    def parts(self) -> "Iterator[ProbedStep]":
        """Its steps inside, which take together what it takes."""
        kept = self.took.activations / (sum(step.took.activations for step in self.inside) or 1.0)
        worked = self.took.work / (sum(step.took.work for step in self.inside) or 1.0)
        earlier = 0.0
        for step in self.inside:
            between = step.took.between * worked if step is not self.inside[0] else 0.0
            took = StepCost(step.took.activations * kept, step.took.work * worked, between, earlier)
            yield dataclasses.replace(step, took=took)
            earlier += step.took.between * worked


@dataclass(frozen=True)
class ProbeResult:
    """Result of a watched run."""

    steps: tuple[ProbedStep, ...]
    """The calls, in order."""
    result: Dependencies
    """What the result was made of."""
    everywhere: tuple[str, ...]
    """Parameters that the model uses outside its pieces; every stage needs them."""
    changed: frozenset[str]
    """The steps whose outputs are then changed in place."""
    changed_buffers: Collection[str] = ()
    """Buffers outside of the pieces that the model changes."""
    tail: float = 0.0
    """Seconds of forward and backward of what follows the last step, the loss for one; 0 where nobody asked."""

    def opened(self, keys: Collection[str]) -> "ProbeResult":
        """Return the row with those among these blocks opened that can be opened."""
        steps = (
            part for step in self.steps for part in (step.parts() if step.key in keys and step.inside else (step,))
        )
        return dataclasses.replace(self, steps=tuple(steps))

    def begins(self, keys: Collection[str]) -> dict[str, int]:
        """Return where each piece begins in the opened row, and each inner step of these blocks but their last."""
        found: dict[str, int] = {}
        place = 0
        for step in self.steps:
            parts = step.inside if step.key in keys else ()
            found[step.key] = place
            found |= {part.key: place + number for number, part in enumerate(parts[:-1])}
            place += len(parts) or 1
        return found

    def ends(self, keys: Collection[str]) -> frozenset[int]:
        """Return where the last step of each of these blocks is in the opened row."""
        steps = self.opened(keys).steps
        return frozenset(place for place, step in enumerate(steps) if step.key in keys)

    def crossing(self, position: int) -> tuple[str, ...]:
        """Return the steps whose outputs cross a cut before step `position`."""
        return tuple(
            step.key for step, last in zip(self.steps[:position], self._last, strict=False) if last >= position
        )

    def effect(self, position: int) -> tuple[str, str] | None:
        """Return a step before a cut, and who needs what it has done beside returning its output, after the cut."""
        before = [step.key for step in self.steps[:position]]
        after = [(step.key, step.past) for step in self.steps[position:]]
        for name, past in (*after, ("the result", self.result)):
            for key in sorted(past.effects):
                if any(key == one or key.startswith(f"{one}.") for one in before):
                    return key, name
        return None

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """The bytes that would cross a cut before each step."""
        change = [0.0] * (len(self.steps) + 2)
        for place, (step, last) in enumerate(zip(self.steps, self._last, strict=True)):
            if last > place:
                change[place + 1] += step.output
                change[last + 1] -= step.output
        return tuple(accumulate(change))[: len(self.steps)]

    @cached_property
    def _last(self) -> tuple[int, ...]:
        """The last step that needs the output of each, or the end."""
        places = {step.key: place for place, step in enumerate(self.steps)}
        last = list(range(len(self.steps)))
        for place, step in enumerate(self.steps):
            for key in step.past.needs:
                last[places[key]] = place
        for key in self.result.needs:
            last[places[key]] = len(self.steps)
        return tuple(last)


def typical(runs: Sequence[ProbeResult], *, model: nn.Module) -> ProbeResult:
    """Return the first of several runs of one model, with the median work of each step and of those that are like it.

    Equal steps (blocks of one kind) do the same work, so where their times differ, the machine was disturbed. The least
    would be too little for many blocks beside one head: of more times, the least is less.
    """
    found: dict[Any, list[StepCost]] = {}
    for run in runs:
        for kind, step in _kinds(run.steps, model):
            found.setdefault(kind, []).append(step.took)
    medians = {
        kind: StepCost(some[0].activations, median(one.work for one in some), median(one.between for one in some))
        for kind, some in found.items()
    }

    def with_medians(steps: Sequence[ProbedStep], *within: Any) -> tuple[ProbedStep, ...]:
        return tuple(
            dataclasses.replace(step, took=medians[kind], inside=with_medians(step.inside, *kind))
            for kind, step in _kinds(steps, model, *within)
            if kind[:-1] == within
        )

    return dataclasses.replace(runs[0], steps=with_medians(runs[0].steps), tail=median(run.tail for run in runs))


def _kinds(steps: Sequence[ProbedStep], model: nn.Module, *within: Any) -> Iterator[tuple[Any, ProbedStep]]:
    """Yield each step, those inside of blocks too, with what is the same of steps that do the same."""
    for place, step in enumerate(steps):
        module = type(model.get_submodule(step.module))
        shapes = tuple(model.get_parameter(name).shape for name in step.parameters)
        kind = (*within, (module, shapes, step.output, step.took.activations, place if within else 0))
        yield kind, step
        yield from _kinds(step.inside, model, *kind)
