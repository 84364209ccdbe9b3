"""Result of a probe: calls of the pieces (modules that a cut keeps whole), their costs, and blocks that can be split.

`probe.py` runs a model on an example and returns a `ProbeResult` for the cut. Some blocks can be split: a stage can
begin at a module inside, as in the picture of docs/pipeline.md ("The cut").

The block's own code between the modules, such as residual sums, runs on both stages. So a block can be split only if
its modules hold all its parameters, and each must run once, in a fixed order. `inner_modules` finds them.
docs/pipeline.md lists the blocks that cannot be split ("Limits"). Nor can blocks with backward hooks: stages begin at
pieces, which may have no such hooks."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwise.model.parameter_units import read_from_children
from meshwise.pipeline.cut.dataflow import Dependencies


class CutError(ValueError):
    """Error for a model that cannot be cut as requested."""


@dataclass(frozen=True)
class CallCost:
    """Cost of one call of a piece, per micro-batch."""

    activations: float
    """Bytes that the forward keeps for the backward."""
    work: float
    """Forward and backward, in seconds (on the meta device, in floating-point operations); 0 if not measured."""


@dataclass(frozen=True)
class PieceCall:
    """One call of one piece of the model."""

    key: str
    """Name of the piece; for its second call `name:2`, and so on."""
    module: str
    """Name of the piece in the model."""
    parameters: tuple[str, ...]
    """First names of the parameters that the piece uses."""
    dependencies: Dependencies
    """Dependencies of the inputs, and of the other values that the piece reads."""
    output: int
    """Bytes of the output."""
    cost: CallCost
    same_shape: bool = False
    """True if the output is one tensor with the shape and dtype of the first input, as for a block."""
    inside: "tuple[PieceCall, ...]" = ()
    """For a block that can be split: the calls of its modules, then (under the block's key) the rest of its code."""

    def parts(self) -> "Iterator[PieceCall]":
        """Yield the calls inside this block. Their costs are scaled to add up to the cost of the block.

        The scaling divides the cost of the block's own code among them."""
        kept = self.cost.activations / (sum(called.cost.activations for called in self.inside) or 1.0)
        worked = self.cost.work / (sum(called.cost.work for called in self.inside) or 1.0)
        for called in self.inside:
            cost = CallCost(called.cost.activations * kept, called.cost.work * worked)
            yield dataclasses.replace(called, cost=cost)


@dataclass(frozen=True)
class ProbeResult:
    """Facts about a model's run on an example, from which the model is cut."""

    calls: tuple[PieceCall, ...]
    """Calls of the pieces, in running order."""
    result: Dependencies
    everywhere: tuple[str, ...]
    """Names of parameters that the model uses outside of its pieces; every stage needs them."""
    changed: frozenset[str]
    """Keys of the calls whose outputs the model later changes in place."""
    changed_buffers: Collection[str] = ()
    """Names of buffers outside of the pieces that the model changes."""
    tail: float = 0.0
    """Seconds of forward and backward after the last call, such as of the loss; 0 if not measured."""

    def with_split_blocks(self, keys: Collection[str]) -> "ProbeResult":
        """Return the result with each block in `keys`, if it can be split, replaced by the calls inside it."""
        parts = (called.parts() if called.key in keys and called.inside else (called,) for called in self.calls)
        return dataclasses.replace(self, calls=tuple(chain.from_iterable(parts)))

    def begins(self, keys: Collection[str]) -> dict[str, int]:
        """Return each key at which a stage can begin, with its place in the calls of `with_split_blocks(keys)`."""
        found: dict[str, int] = {}
        place = 0
        for called in self.calls:
            parts = called.inside if called.key in keys else ()
            found[called.key] = place
            found |= {part.key: place + number for number, part in enumerate(parts[:-1])}
            place += len(parts) or 1
        return found

    def keys_sent(self, position: int) -> tuple[str, ...]:
        """Return the keys of the outputs that must be sent if a stage begins at call number `position`."""
        before = zip(self.calls[:position], self._last, strict=False)
        return tuple(called.key for called, last in before if last >= position)

    def effect(self, position: int) -> tuple[str, str] | None:
        """Return (key of a call before `position` with a side effect, key of a later user of the effect), or None."""
        before = [called.key for called in self.calls[:position]]
        after = [(called.key, called.dependencies) for called in self.calls[position:]]
        for name, dependencies in (*after, ("the result", self.result)):
            for key in sorted(dependencies.effects):
                if any(key == one or key.startswith(f"{one}.") for one in before):
                    return key, name
        return None

    @cached_property
    def sent_bytes(self) -> tuple[float, ...]:
        """For each call, the bytes that must be sent per micro-batch if a stage begins there."""
        change = [0.0] * (len(self.calls) + 2)
        for place, (called, last) in enumerate(zip(self.calls, self._last, strict=True)):
            if last > place:
                change[place + 1] += called.output
                change[last + 1] -= called.output
        return tuple(accumulate(change))[: len(self.calls)]

    @cached_property
    def _last(self) -> tuple[int, ...]:
        """For each call, the place of the last call that needs its output; number of calls if the result needs it."""
        places = {called.key: place for place, called in enumerate(self.calls)}
        last = list(range(len(self.calls)))
        for place, called in enumerate(self.calls):
            for key in called.dependencies.needs:
                last[places[key]] = place
        for key in self.result.needs:
            last[places[key]] = len(self.calls)
        return tuple(last)


def has_no_values(model: nn.Module) -> bool:
    """Return whether any parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def with_typical_costs(seen: ProbeResult, *, runs: Sequence[ProbeResult], model: nn.Module) -> ProbeResult:
    """Return `seen` with the costs of timed runs; each call gets the median work of its equal calls in all runs.

    Equal calls (blocks of one kind) do the same work; their times differ only by disturbances of the machine. A minimum
    would be unfair: the more calls of a kind are measured, the smaller is their minimum."""
    found: dict[Any, list[CallCost]] = {}
    for run in runs:
        for kind, called in _kinds(run.calls, model):
            found.setdefault(kind, []).append(called.cost)
    medians = {kind: CallCost(some[0].activations, median(one.work for one in some)) for kind, some in found.items()}

    def with_medians(calls: Sequence[PieceCall], timed: Sequence[PieceCall], *within: Any) -> tuple[PieceCall, ...]:
        kinds = [(kind, one.inside) for kind, one in _kinds(timed, model, *within) if kind[:-1] == within]
        return tuple(
            dataclasses.replace(
                called, cost=medians[kind], inside=called.inside and with_medians(called.inside, inside, *kind)
            )
            for called, (kind, inside) in zip(calls, kinds, strict=True)
        )

    calls = with_medians(seen.calls, runs[0].calls)
    return dataclasses.replace(seen, calls=calls, tail=median(run.tail for run in runs))


def _kinds(calls: Sequence[PieceCall], model: nn.Module, *within: Any) -> Iterator[tuple[Any, PieceCall]]:
    """Yield (kind, call) for each call, and for the calls inside of blocks; equal calls have equal kinds."""
    for place, called in enumerate(calls):
        module = type(model.get_submodule(called.module))
        shapes = tuple(model.get_parameter(name).shape for name in called.parameters)
        kind = (*within, (module, shapes, called.output, called.cost.activations, place if within else 0))
        yield kind, called
        yield from _kinds(called.inside, model, *kind)


def inner_modules(block: nn.Module) -> tuple[str, ...]:
    """Return the names (relative to the block) of the modules at which a stage may begin; empty if there is none."""
    names = tuple(_modules_with_forward(block, ""))
    theirs = {id(parameter) for name in names for parameter in block.get_submodule(name).parameters()}
    if any(map(has_backward_hooks, block.modules())):
        return ()
    computes = any(id(parameter) not in theirs for parameter in block.parameters()) or read_from_children(block)
    kinds = Counter((name.rpartition(".")[0], type(block.get_submodule(name))) for name in names if "." in name)
    has_equal = any(count > 1 for count in kinds.values())  # such as experts, from which the data may choose
    return () if computes or len(names) < 2 or has_equal else names


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that see gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_repeated() -> bool:
    """Return whether torch's checkpoint will run this code again in the backward, where received values are missing."""
    if not torch.is_grad_enabled():
        return True
    one = torch.ones((), requires_grad=True)
    product = one * one
    assert product.grad_fn is not None
    # torch's checkpoint replaces every saved tensor by an object of its own.
    return type(product.grad_fn._raw_saved_self.data).__module__ == checkpoint.__module__  # type: ignore[attr-defined]


def _modules_with_forward(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of the modules that have parameters and a forward; a ModuleList yields its inner modules."""
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            if type(child).forward is nn.Module.forward:
                yield from _modules_with_forward(child, f"{path}{name}.")
            else:
                yield f"{path}{name}"
