"""Watch one run of a whole model on an example: the order of its pieces, their dependencies and their costs.

A value may reach a later piece through sums, residual connections or any other code between pieces. It is followed back
to the outputs that it was made of (`dataflow.py`), which would have to cross a cut. Following takes time, so time is
measured in separate runs.

Of a model on the meta device the pieces run there, and operations are counted in place of time. What lies between
them runs where the example is, on zeros: models look at values there, of masks and positions, as they will in a stage.

Blocks that can be opened (`block_entry.py`) run in the same way in runs of their own, for what the modules in them need
and cost.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.memory.malloc_settings import kept
from meshwise.model.blocks import GatheredModule, Patterns, partition
from meshwise.model.deferred_init import build_without_values
from meshwise.model.meta_kernels import MetaKernels
from meshwise.model.module_copy import copied
from meshwise.model.shape_constants import ShapeConstants
from meshwise.pipeline.cut.block_entry import inside, is_repeated
from meshwise.pipeline.cut.dataflow import DataflowTracer, Dependencies, unchanged
from meshwise.pipeline.cut.meta_values import as_zeros, device_of, is_bare
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.cut.probe_result import ProbedStep, ProbeResult, StepCost, typical
from meshwise.pipeline.cut.profile_module import (
    LossTail,
    cut_off,
    is_alike,
    kind_of,
    noting,
    profile_module,
    reading,
    size,
)
from meshwise.pipeline.run.packed_tree import StageEntrance
from meshwise.pipeline.run.split_backward import is_reentrant

Call = Callable[[nn.Module], Any]

ROUNDS = 3
"""Runs that time is measured in; the median of a piece, and of those like it, counts. Operations are counted once."""


def probe(
    model: nn.Module, *, call: Call, pieces: Patterns = (), timed: bool = False, opens: bool = False
) -> ProbeResult:
    """Run `call(model)` on a copy that shares the model's parameters and nothing else.

    `pieces` are patterns over module names that override how the model is divided (see `meshwise.model.blocks`).
    With `opens`, blocks that can be opened have steps inside.

    Raises CutError for patterns that name nothing, and a piece that is called in a reentrant checkpoint of torch.
    """
    try:
        found = [piece for unit in partition(model, units=pieces) for piece in unit]
    except ValueError as error:
        raise CutError(str(error)) from None
    seen = _seen(model, call, found, timed=timed)
    changed = seen.changed_buffers
    if owners := sorted({owner for owner in map(_owner, changed) if _has_no_parameters(model, owner)}):
        found += [GatheredModule(owner, ()) for owner in owners]
        seen = _seen(model, call, found, timed=timed)
        called = {step.module for step in seen.steps}
        seen = dataclasses.replace(seen, changed_buffers={name for name in changed if _owner(name) not in called})
    parts = {piece.module: inside(model.get_submodule(piece.module)) for piece in found if opens and piece.block}
    if not any(parts.values()):
        return seen
    opened = _seen(model, call, found, timed=timed, parts=parts)
    steps = (
        dataclasses.replace(whole, inside=step.inside) for whole, step in zip(seen.steps, opened.steps, strict=True)
    )
    changed = seen.changed | opened.changed
    return dataclasses.replace(seen, steps=tuple(steps), changed=changed)


def _owner(buffer: str) -> str:
    return buffer.rpartition(".")[0]


def _has_no_parameters(model: nn.Module, name: str) -> bool:
    """Return whether this is a module without parameters, as some batch norms are: it runs on one stage, as a piece."""
    return bool(name) and next(model.get_submodule(name).parameters(), None) is None


@dataclass(frozen=True)
class _Modes:
    """Dispatch modes of a run: known values of meta tensors, and dependencies."""

    known: ShapeConstants = field(default_factory=ShapeConstants)
    followed: DataflowTracer = field(default_factory=DataflowTracer)


_Parts: TypeAlias = Mapping[str, Sequence[str]]
"""Of blocks, the modules in them that are watched in their place."""


def _seen(
    model: nn.Module, call: Call, found: Sequence[GatheredModule], *, timed: bool, parts: _Parts = MappingProxyType({})
) -> ProbeResult:
    """Return the result of runs in which these parts are watched in place of the blocks."""
    modes = _Modes()
    with contextlib.ExitStack() as stack:
        for mode in (MetaKernels(), modes.known, modes.followed) if is_bare(model) else (modes.followed,):
            stack.enter_context(mode)
        seen = _run(model, call, found, modes, timed=timed and is_bare(model), parts=parts)
    if not timed or is_bare(model):
        return seen
    with kept():
        runs = [_run(model, call, found, _Modes(), timed=True, parts=parts) for _ in range(ROUNDS)]
    costs = typical(runs, model=model)
    return dataclasses.replace(seen, steps=_with_costs(seen.steps, costs.steps), tail=costs.tail)


def _with_costs(steps: Sequence[ProbedStep], costs: Sequence[ProbedStep]) -> tuple[ProbedStep, ...]:
    """Return the same steps with what they took in another run."""
    return tuple(
        dataclasses.replace(step, took=cost.took, inside=_with_costs(step.inside, cost.inside) if step.inside else ())
        for step, cost in zip(steps, costs, strict=True)
    )


def _run(
    model: nn.Module, call: Call, found: Sequence[GatheredModule], modes: _Modes, *, timed: bool, parts: _Parts
) -> ProbeResult:
    """Return one run."""
    everywhere = tuple(name for piece in found if piece.spans for name in piece.parameters)
    bare = is_bare(model)
    watched = copied(model, tensors={parameter: parameter for parameter in model.parameters()})
    shadow = copied(model, tensors={t: build_without_values(t) for t in _tensors(model)}) if bare else watched
    if bare:
        watched.register_forward_pre_hook(partial(_give_zeros, names=everywhere), with_kwargs=True)
    pieces = {piece.module: watched.get_submodule(piece.module) for piece in found if not piece.spans}
    owned = [name for piece in found if not piece.spans for name in piece.parameters]
    modes.followed.name({name: watched.get_parameter(name) for name in owned})
    before = _buffers_outside(watched, pieces=pieces)
    watch = _Watch({piece.module: piece.parameters for piece in found}, modes, timed=timed)
    for name, module in pieces.items():
        own = shadow.get_submodule(name) if bare else None
        module.forward = _Watched(name, module, watch, parts=parts.get(name, ()), shadow=own)
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            result = call(watched)
        tail = watch.since.to(result) if timed and not bare else 0.0
        changed = _changes(before, _buffers_outside(watched, pieces=pieces))
        return dataclasses.replace(watch.seen(result, everywhere), tail=tail, changed_buffers=changed)
    finally:
        for module in pieces.values():  # which would hold this run's tensors until the next collection of garbage
            del module.forward


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _give_zeros(model: nn.Module, args: Any, kwargs: Any, *, names: Sequence[str]) -> None:
    """Parameters without values, which the model uses outside of its pieces, as zeros where the example is."""
    device = device_of((args, kwargs))
    for name in names:
        path, _, key = name.rpartition(".")
        old = model.get_parameter(name)
        zeros = torch.zeros_like(old, device=device)
        setattr(model.get_submodule(path), key, nn.Parameter(zeros, requires_grad=old.requires_grad))


class _Watch:
    """Observations of a run so far."""

    def __init__(self, parameters: Mapping[str, tuple[str, ...]], modes: _Modes, *, timed: bool) -> None:
        self.timed = timed
        self.steps: list[ProbedStep] = []
        self.counted: dict[Hashable, StepCost] = {}
        """Of modules without values, by their kind: those that are alike do the same, and to count takes its time."""
        self.parameters = parameters
        self.followed, self.known = modes.followed, modes.known
        self.since = LossTail(())
        self._calls: Counter[str] = Counter()
        self._hidden: list[str] = []

    def key(self, name: str) -> str:
        """Return the key of one more call of a piece."""
        self._calls[name] += 1
        key = name if self._calls[name] == 1 else f"{name}:{self._calls[name]}"
        if not torch.is_grad_enabled():
            self._hidden.append(key)
        return key

    def past(self, values: Any) -> Dependencies:
        """Return the dependencies of values between the pieces. Raises CutError where a checkpoint hides it from
        autograd.
        """
        if self._hidden and is_reentrant(tensors(values)):
            raise CutError(
                f"{self._hidden[-1]} is called in a reentrant checkpoint of torch, which no gradient of what a stage "
                "receives would leave; use checkpoint(..., use_reentrant=False), or recompute=full in the plan"
            )
        return self.followed.of(values)

    def output(self, values: Any, *, key: str, made: bool = False) -> Any:
        """Return the output of a step, cut off from what it was made of. `made`: in memory that nothing else has."""
        return map_tensors(lambda tensor: self._output(tensor, key, made=made), values)

    def _output(self, tensor: Tensor, key: str, *, made: bool) -> Tensor:
        own = self.followed.output(tensor, key=key, made=made)
        if not own.dtype.is_floating_point:
            return own
        entered: Tensor = StageEntrance.apply(own.requires_grad_())
        return entered

    def seen(self, result: Any, everywhere: tuple[str, ...]) -> ProbeResult:
        """Return all of it. Only a block that is called once, and whose output is all that leaves it, can be opened."""
        past = self.past(result)
        pasts = {step.key: [step.past, *(part.past for part in step.inside)] for step in self.steps}

        def opens(step: ProbedStep) -> bool:
            others = [past, *(one for key, several in pasts.items() if key != step.key for one in several)]
            used = {key for one in others for key in one.needs | one.effects}
            return self._calls[step.module] == 1 and used.isdisjoint(part.key for part in step.inside[:-1])

        steps = (step if opens(step) else dataclasses.replace(step, inside=()) for step in self.steps)
        return ProbeResult(tuple(steps), past, everywhere, frozenset(self.followed.changed))


class _Watched:
    """Stands where a piece's forward was."""

    def __init__(
        self, name: str, module: nn.Module, watch: _Watch, *, parts: Sequence[str], shadow: nn.Module | None
    ) -> None:
        """`shadow` runs in place of a module without values, on the meta device."""
        self._name, self._module, self._watch, self._parts = name, module, watch, parts
        self._shadow = shadow

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the piece on its own, and note what it took."""
        watch, given = self._watch, (args, kwargs)
        past, device = watch.past(given), device_of(given)
        key = watch.key(self._name)
        if self._shadow is None:
            output, step = self._step(key, self._module, given)
        else:
            put, inputs = partial(as_zeros, device=device), map_tensors(lambda tensor: tensor.to("meta"), given)
            stand_ins = zip(tensors(given), tensors(inputs), strict=True)  # of what has been computed zeros stand here
            watch.known.forget(b for a, b in stand_ins if b.is_floating_point() or watch.followed.is_of_pieces(a))
            _share_hooks(self._module, other=self._shadow)
            with (
                watch.followed.given(given, held=inputs, key=key, put=put),
                watch.followed.in_place_of(self._module, held=self._shadow, key=key, put=put),
                watch.known.forward(),
            ):
                output, step = self._without_values(key, self._shadow, inputs)
            output = put(output)
        watch.steps.append(dataclasses.replace(step, past=past | step.past))
        output = watch.output(output, key=key, made=self._shadow is not None)
        watch.since = LossTail(output)
        return output

    def _without_values(self, key: str, shadow: nn.Module, inputs: tuple[Any, Any]) -> tuple[Any, ProbedStep]:
        try:
            return self._step(key, shadow, inputs)
        except RuntimeError as error:
            raise CutError(
                f"{key} cannot run without values: {error}\nA model that is given as a function is cut on the meta "
                f"device. Give the module itself, or let {key} ask for no values (of a mixture of transformers, "
                "experts_implementation='batched_mm' asks for none)"
            ) from error

    def _step(self, key: str, module: nn.Module, inputs: tuple[Any, Any]) -> tuple[Any, ProbedStep]:
        watch, parameters = self._watch, self._watch.parameters[self._name]
        if self._parts and not is_repeated():
            block = _Inside(self._name, module, watch, parts=self._parts)
            output = block.run(*inputs)
            return output, ProbedStep(
                key, self._name, parameters, Dependencies(), size(output), StepCost(0.0, 0.0), inside=block.steps
            )
        output, took, used = _own_forward(module, key, watch, inputs=inputs)
        return output, ProbedStep(
            key, self._name, parameters, used, size(output), took, is_alike(output, inputs=inputs)
        )


def _share_hooks(module: nn.Module, *, other: nn.Module) -> None:
    """Give a copied module the hooks of the original, including later ones: some models register hooks as they run."""
    for one, copy in zip(module.modules(), other.modules(), strict=True):
        vars(copy).update((name, held) for name, held in vars(one).items() if "hooks" in name)


_WITH_BACKWARD = 3.0
"""Forward and backward of operations with two operands, in forwards."""


class _Inside:
    """A run of a block in which the modules in it are watched as the pieces of the model are."""

    def __init__(self, name: str, module: nn.Module, watch: _Watch, *, parts: Sequence[str]) -> None:
        self.steps: tuple[ProbedStep, ...] = ()
        self._name, self._module, self._watch, self._parts = name, module, watch, parts
        names = {id(p): own for own, p in zip(watch.parameters[name], module.parameters(), strict=True)}
        self._held = {p: tuple(names[id(one)] for one in module.get_submodule(p).parameters()) for p in parts}
        self._found: list[ProbedStep] = []
        self._repeated = False
        self._kept: dict[int, int] = {}
        self._read: Callable[[], float] = float
        self._since = 0.0

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the block's output; afterwards `steps` are those inside, none when the modules do not run once each
        or, under torch's checkpoint, will again.
        """
        inputs, parts = (args, kwargs), {name: self._module.get_submodule(name) for name in self._parts}
        keep = noting(self._kept, parameters=self._module.parameters())
        for name, part in parts.items():
            part.forward = partial(self._part, name, part)
        try:
            with reading(inputs, timed=self._watch.timed) as self._read, saved_tensors_hooks(keep, unchanged):
                self._since = self._read()
                output = type(self._module).forward(self._module, *args, **kwargs)
                between, kept = self._between()
        finally:
            for part in parts.values():
                del part.forward
        found = sorted(step.module for step in self._found)
        if not self._repeated and found == sorted(f"{self._name}.{name}" for name in parts):
            took = StepCost(kept, _WITH_BACKWARD * between, between)
            past, alike = self._watch.followed.of(output), is_alike(output, inputs=inputs)
            self.steps = (*self._found, ProbedStep(self._name, self._name, (), past, size(output), took, alike))
        return output

    def _part(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stands where the module's forward was."""
        self._repeated |= is_repeated()
        between, kept = self._between()
        inputs, watch, full = (args, kwargs), self._watch, f"{self._name}.{name}"
        past = watch.followed.of(inputs)
        output, took, used = _own_forward(module, full, watch, inputs=inputs)
        took = StepCost(took.activations + kept, took.work + _WITH_BACKWARD * between, between)
        step = ProbedStep(
            full, full, self._held[name], past | used, size(output), took, is_alike(output, inputs=inputs)
        )
        self._found.append(step)
        output = watch.output(output, key=full)
        self._since = self._read()
        return output

    def _between(self) -> tuple[float, int]:
        """Return the seconds and bytes of the block's own code since its last module."""
        kept = sum(self._kept.values())
        self._kept.clear()
        return self._read() - self._since, kept


def _own_forward(
    module: nn.Module, key: str, watch: _Watch, *, inputs: tuple[Any, Any]
) -> tuple[Any, StepCost, Dependencies]:
    """Return the result of the class's own `forward`, its cost, and the dependencies it used."""
    run, parameters, held = partial(type(module).forward, module), list(module.parameters()), cut_off(inputs)
    counts = watch.timed and any(tensor.is_meta for tensor in (*parameters, *tensors(held)))
    kind = kind_of(module, inputs=held)
    known = watch.counted.get(kind) if counts else None
    with watch.followed.inside(key), watch.followed.given(inputs, held=held, key=key):
        output, took = profile_module(run, inputs=held, parameters=parameters, timed=watch.timed and known is None)
        if known is not None and known.activations != took.activations:
            output, took = profile_module(run, inputs=held, parameters=parameters, timed=True)
        elif counts:
            took = watch.counted[kind] = known or took
        return output, took, watch.followed.used


def _buffers_outside(model: nn.Module, *, pieces: Collection[str]) -> dict[str, tuple[Tensor, int]]:
    """Return the buffers outside of these pieces by name, each with its version."""
    inside_pieces = {one for name in pieces for one in model.get_submodule(name).modules()}
    return {
        f"{owner}.{name}" if owner else name: (buffer, buffer._version)
        for owner, module in model.named_modules()
        if module not in inside_pieces
        for name, buffer in module.named_buffers(recurse=False)
    }


def _changes(before: dict[str, tuple[Tensor, int]], after: dict[str, tuple[Tensor, int]]) -> frozenset[str]:
    """Return the names that were written to or replaced; new names are no state, because each run makes them."""
    return frozenset(
        name
        for name, (tensor, version) in before.items()
        if name not in after or after[name][0] is not tensor or after[name][1] != version
    )
