"""One run of a whole model on an example, watched: which pieces run in which order, what each needs of the others, and
what each costs.

The outputs of every piece are cut off from the piece and marked. Whatever reaches a later piece, through sums, residual
connections and anything else that the model does between its pieces, leads back to marks along autograd's graph; so it
is seen which outputs would have to cross a cut.

Of a model on the meta device the pieces run there, and operations are counted in place of time. What lies between
them runs where the example is, on zeros: models look at values there, of masks and positions, as they will in a stage.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwise.model.birth import without_values
from meshwise.model.blocks import Patterns, partition
from meshwise.pipeline.parcel import Entrance
from meshwise.tree import map_tensors, tensors

Call = Callable[[nn.Module], Any]

ROUNDS = 3
"""Runs that time is measured in; the least of each piece, and of those like it, counts."""


@dataclass(frozen=True)
class Took:
    """What a step costs."""

    activations: int
    """Bytes that its forward keeps for its backward."""

    work: float
    """Of its forward and backward: seconds, or without values floating-point operations; 0 where nobody asked."""


@dataclass(frozen=True)
class Step:
    """One call of one piece."""

    key: str
    """The piece's name, with a number from its second call on."""

    module: str
    """The piece's name."""

    parameters: tuple[str, ...]
    """First names of the parameters it uses."""

    needs: frozenset[int]
    """Which earlier steps' outputs reach it."""

    output: int
    """Bytes that it returns."""

    took: Took
    """What it took."""

    alike: bool = False
    """Whether it returns one tensor, of the shape and dtype of the first that it is given, as blocks of a stream do."""


@dataclass(frozen=True)
class Seen:
    """What the run has shown."""

    steps: tuple[Step, ...]
    """The calls, in order."""

    result: frozenset[int]
    """Which steps' outputs reach the result."""

    everywhere: tuple[str, ...]
    """Parameters that the model uses outside its pieces; every stage needs them."""

    changed: frozenset[int]
    """The steps whose outputs the model then changes in place, outside its pieces."""

    def crossing(self, position: int) -> tuple[int, ...]:
        """The steps whose outputs cross a cut before step `position`."""
        later = [*(step.needs for step in self.steps[position:]), self.result]
        return tuple(sorted({source for needs in later for source in needs if source < position}))


def probe(model: nn.Module, *, call: Call, pieces: Patterns = (), timed: bool = False) -> Seen:
    """Run `call(model)` on a copy that shares the model's parameters and nothing else.

    `pieces` are patterns over module names that override how the model is divided (see `meshwise.model.blocks`).
    """
    found = [piece for unit in partition(model, units=pieces) for piece in unit]
    everywhere = tuple(name for piece in found if piece.spans for name in piece.parameters)
    bare = is_bare(model)
    runs = []
    for _ in range(ROUNDS if timed else 1):
        watched = copied(model, tensors={parameter: parameter for parameter in model.parameters()})
        shadow = copied(model, tensors={t: without_values(t) for t in _tensors(model)}) if bare else watched
        if bare:
            watched.register_forward_pre_hook(partial(_give_zeros, names=everywhere), with_kwargs=True)
        watch = _Watch({piece.module: piece.parameters for piece in found}, timed=timed)
        for name in (piece.module for piece in found if not piece.spans):
            watched.get_submodule(name).forward = _Watched(name, shadow.get_submodule(name), watch, bare=bare)
        with torch.random.fork_rng(), torch.enable_grad():
            result = call(watched)
        runs.append(Seen(tuple(watch.steps), watch.sources(tensors(result)), everywhere, watch.changed()))
    return fastest(runs, model=model)


def fastest(runs: Sequence[Seen], *, model: nn.Module) -> Seen:
    """The first of several runs of one model, with the least work of each step and of those that are like it.

    Steps that are alike (blocks of one kind) do the same, so where their times differ, the machine did something else.
    """
    least: dict[Any, float] = {}
    for step in (step for run in runs for step in run.steps):
        kind = _kind(step, model)
        least[kind] = min(step.took.work, least.get(kind, math.inf))
    steps = (
        dataclasses.replace(step, took=Took(step.took.activations, least[_kind(step, model)])) for step in runs[0].steps
    )
    return dataclasses.replace(runs[0], steps=tuple(steps))


def _kind(step: Step, model: nn.Module) -> Any:
    """What is the same of steps that do the same."""
    what = type(model.get_submodule(step.module)) if step.module else step.key.rstrip("_0123456789")
    shapes = tuple(model.get_parameter(name).shape for name in step.parameters)
    return what, shapes, step.output, step.took.activations


def copied(model: nn.Module, *, tensors: Mapping[Tensor, Tensor]) -> nn.Module:
    """A copy of the modules, with other tensors in place of some of the model's; the rest of the tensors are copied."""
    return copy.deepcopy(model, memo={id(old): new for old, new in tensors.items()})


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _give_zeros(model: nn.Module, args: Any, kwargs: Any, *, names: Sequence[str]) -> None:
    """Parameters without values, which the model uses outside of its pieces, as zeros where the example is."""
    device = device_of((args, kwargs))
    for name in names:
        path, _, key = name.rpartition(".")
        zeros = torch.zeros_like(model.get_parameter(name), device=device)
        setattr(model.get_submodule(path), key, nn.Parameter(zeros))


class _Watch:
    """What has been seen so far, and the marks: leaves that stand for the outputs of steps."""

    def __init__(self, parameters: Mapping[str, tuple[str, ...]], *, timed: bool) -> None:
        self.timed = timed
        self.steps: list[Step] = []
        self._parameters = parameters
        self._calls: Counter[str] = Counter()
        self._marks: dict[int, tuple[int, Tensor]] = {}
        self._marked: list[tuple[int, Tensor, int]] = []

    def step(self, name: str, output: Any, *, inputs: Any, needs: frozenset[int], took: Took) -> Any:
        """Note one call, and return its output cut off and marked."""
        index, number = len(self.steps), self._calls[name]
        self._calls[name] += 1
        key = f"{name}:{number + 1}" if number else name
        alike = _described(output) == _described(next(tensors(inputs), None))
        self.steps.append(Step(key, name, self._parameters[name], needs, size(output), took, alike))
        return map_tensors(lambda tensor: self._mark(tensor, index), output)

    def _mark(self, tensor: Tensor, index: int) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self._marks[id(leaf)] = (index, leaf)
        marked: Tensor = Entrance.apply(leaf)
        self._marked.append((index, marked, marked._version))
        return marked

    def changed(self) -> frozenset[int]:
        """The steps whose outputs are no longer what they were."""
        return frozenset(index for index, marked, version in self._marked if marked._version != version)

    def sources(self, values: Iterator[Tensor]) -> frozenset[int]:
        """The steps from whose outputs these tensors were made."""
        waiting = [tensor.grad_fn for tensor in values]
        seen: set[Any] = set()
        found: set[int] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if id(leaf) in self._marks:
                found.add(self._marks[id(leaf)][0])
        return frozenset(found)


class _Watched:
    """Stands where a piece's forward was."""

    def __init__(self, name: str, module: nn.Module, watch: _Watch, *, bare: bool) -> None:
        self._name, self._module, self._watch, self._bare = name, module, watch, bare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the piece on its own, and note what it took."""
        needs, device = self._watch.sources(tensors((args, kwargs))), device_of((args, kwargs))
        if self._bare:
            args, kwargs = on_meta((args, kwargs))
        output, took = alone(
            lambda args, kwargs: type(self._module).forward(self._module, *args, **kwargs),
            inputs=(args, kwargs),
            parameters=list(self._module.parameters()),
            timed=self._watch.timed,
        )
        if self._bare:
            output = as_zeros(output, device=device)
        return self._watch.step(self._name, output, inputs=(args, kwargs), needs=needs, took=took)


def alone(
    run: Callable[[Any, Any], Any], *, inputs: tuple[Any, Any], parameters: Sequence[Tensor], timed: bool
) -> tuple[Any, Took]:
    """Run a part of a model, cut off from what its inputs came from; its backward too, when it is timed."""
    leaves: list[Tensor] = []

    def own(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        entered: Tensor = Entrance.apply(leaves[-1])
        return entered

    args, kwargs = map_tensors(own, inputs)
    kept: dict[int, int] = {}
    stored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in stored:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    bare = any(tensor.is_meta for tensor in (*parameters, *tensors((args, kwargs))))
    with FlopCounterMode(display=False) if timed and bare else contextlib.nullcontext() as counted:
        begin = _now(leaves)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run(args, kwargs)
        results = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if timed and results:
            with _gradients_kept(parameters):
                torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        seconds = _now(leaves) - begin if timed else 0.0
    return output, Took(sum(kept.values()), seconds if counted is None else float(counted.get_total_flops()))


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards the parameters have the gradients that they had before."""
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _described(value: Any) -> Any:
    """The shape and dtype of a tensor; of anything else something that equals nothing."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else object()


def is_bare(model: nn.Module) -> bool:
    """Whether its parameters have no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def on_meta(values: Any) -> Any:
    """A tree of values with its tensors on the meta device."""
    return map_tensors(lambda tensor: tensor.to("meta"), values)


def as_zeros(values: Any, *, device: torch.device) -> Any:
    """A tree of values with zeros in place of its tensors."""
    return map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), values)


def device_of(inputs: Any) -> torch.device:
    """Where the first tensor of a call's arguments is; the CPU when there is none."""
    return next((tensor.device for tensor in tensors(inputs)), torch.device("cpu"))


def size(value: Any) -> int:
    """Bytes of a value's tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(value)}.values())


def _now(on: Sequence[Tensor]) -> float:
    if any(tensor.is_cuda for tensor in on):
        torch.cuda.synchronize()
    return time.perf_counter()
