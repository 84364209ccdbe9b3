"""Run a model on an example, and record the order of its pieces, their dependencies and their costs.

A value may reach a later piece through sums, residual connections or any other code between pieces. `dataflow.py` finds
the outputs on which the value depends; a stage would have to send these outputs. Time is measured in separate runs.

If the model is on the meta device, its pieces run there, and operations are counted in place of time. The code between
the pieces runs on zeros on the example's device, because models read the values of masks and positions.

`profile_module` measures one module: time (or operations) and saved bytes. Blocks that can be split (`inner_modules`)
are traced in another run, in which their modules are the pieces."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.streams import streams_of
from meshwise.memory.malloc_options import keep_freed_memory
from meshwise.memory.recompute_costs import saved_bytes_hook
from meshwise.model.deferred_init import shapes_of
from meshwise.model.find_mixtures import compute_experts
from meshwise.model.meta_tensor_values import MetaKernels, ShapeConstants
from meshwise.model.module_copy import copy_modules
from meshwise.model.parameter_units import GatheredModule, Patterns, partition
from meshwise.pipeline.cut.dataflow import DataflowTracer, Dependencies, unchanged
from meshwise.pipeline.cut.probe_result import (
    CallCost,
    CutError,
    PieceCall,
    ProbeResult,
    has_no_values,
    inner_modules,
    is_repeated,
    with_typical_costs,
)
from meshwise.pipeline.run.stage_backward import entered, is_reentrant

Call = Callable[[nn.Module], Any]
"""Function that runs a model on an example, and returns the output or the loss."""

ROUNDS = 3
"""Number of timed runs. A call gets the median time of its equal calls in all runs; operations need one run."""


def probe(
    model: nn.Module, *, call: Call, pieces: Patterns = (), timed: bool = False, splits: bool = False
) -> ProbeResult:
    """Run `call` on a copy of the model that shares only its parameters, and return the calls of the pieces.

    `pieces`: patterns over module names that replace the automatic choice of pieces (see `model.parameter_units`).
    `timed`: also measure costs. `splits`: also record the calls inside of the blocks that can be split.

    Raises CutError for patterns that match no module, and for a piece inside of a reentrant checkpoint of torch."""
    try:
        found = [piece for unit in partition(model, units=pieces) for piece in unit]
    except ValueError as error:
        raise CutError(str(error)) from None
    seen = _traced(model, call, found, timed=timed)
    changed = seen.changed_buffers
    # A module without parameters, as some batch norms, can be a separate piece.
    inside = {name.rpartition(".")[0] for name in changed} - {""}
    if owners := sorted(owner for owner in inside if next(model.get_submodule(owner).parameters(), None) is None):
        found += [GatheredModule(owner, ()) for owner in owners]
        seen = _traced(model, call, found, timed=timed)
        ran = {made.module for made in seen.calls}
        seen = dataclasses.replace(
            seen, changed_buffers={name for name in changed if name.rpartition(".")[0] not in ran}
        )
    parts = {one.module: inner_modules(model.get_submodule(one.module)) for one in found if splits and one.block}
    if not any(parts.values()):
        return seen
    inner = _traced(model, call, found, timed=timed, parts=parts)
    calls = (dataclasses.replace(whole, inside=one.inside) for whole, one in zip(seen.calls, inner.calls, strict=True))
    return dataclasses.replace(seen, calls=tuple(calls), changed=seen.changed | inner.changed)


_Parts: TypeAlias = Mapping[str, Sequence[str]]
"""For each block to split, the names of its modules (`inner_modules`)."""


def _traced(
    model: nn.Module, call: Call, found: Sequence[GatheredModule], *, timed: bool, parts: _Parts = MappingProxyType({})
) -> ProbeResult:
    """Return the result of a traced run and, if `timed`, of separate runs that measure time."""
    record = _RunRecord(found, timed=timed and has_no_values(model))
    with contextlib.ExitStack() as stack:
        meta = (MetaKernels(), record.known) if has_no_values(model) else ()
        for mode in (*meta, record.tracer.reads, record.tracer):
            stack.enter_context(mode)
        seen = _run(model, call, found, record, parts=parts)
    if not timed or has_no_values(model):
        return seen
    with keep_freed_memory():
        runs = [_run(model, call, found, _RunRecord(found, timed=True), parts=parts) for _ in range(ROUNDS)]
    return with_typical_costs(seen, runs=runs, model=model)


def _run(
    model: nn.Module, call: Call, found: Sequence[GatheredModule], record: "_RunRecord", *, parts: _Parts
) -> ProbeResult:
    """Return the result of one run of a copy of the model, with the forwards of the pieces `found` recorded."""
    everywhere = tuple(name for piece in found if piece.spans for name in piece.parameters)
    bare = has_no_values(model)
    watched = copy_modules(model, tensors={parameter: parameter for parameter in model.parameters()})
    shadow = shapes_of(model, seed=0).module if bare else watched
    if bare:
        compute_experts(shadow, by="grouped_mm")
        watched.register_forward_pre_hook(partial(_give_zeros, names=everywhere), with_kwargs=True)
    pieces = {piece.module: watched.get_submodule(piece.module) for piece in found if not piece.spans}
    owned = [name for piece in found if not piece.spans for name in piece.parameters]
    record.tracer.register_parameters({name: watched.get_parameter(name) for name in owned})
    before = _buffers_outside(watched, pieces=pieces)
    for name, module in pieces.items():
        own = shadow.get_submodule(name) if bare else None
        module.forward = _RecordedForward(name, module, record, parts.get(name, ()), own)
    try:
        with torch.random.fork_rng(), torch.enable_grad(), record.known.forward():
            result = call(watched)
        last, ended = record.last
        tail = seconds_of_tail(last, since=ended, result=result) if record.timed and not bare else 0.0
        # A buffer that is new is no state.
        changed = frozenset(name for name, _, _ in before - _buffers_outside(watched, pieces=pieces))
        return dataclasses.replace(record.probe_result(result, everywhere), tail=tail, changed_buffers=changed)
    finally:
        for module in pieces.values():  # else it would keep this run's tensors alive until the next garbage collection
            del module.forward


def device_of(inputs: Any) -> torch.device:
    """Return the device of the first tensor in a tree of inputs, or the CPU if there is no tensor."""
    return next((tensor.device for tensor in tensors(inputs)), torch.device("cpu"))


def _give_zeros(model: nn.Module, args: Any, kwargs: Any, *, names: Sequence[str]) -> None:
    """Replace the parameters that the model uses outside its pieces by zeros, on the example's device."""
    device = device_of((args, kwargs))
    for name in names:
        path, _, key = name.rpartition(".")
        old = model.get_parameter(name)
        zeros = torch.zeros_like(old, device=device)
        setattr(model.get_submodule(path), key, nn.Parameter(zeros, requires_grad=old.requires_grad))


class _RunRecord:
    """Record of a run: the calls so far, and the modes that observe it."""

    def __init__(self, found: Sequence[GatheredModule], *, timed: bool) -> None:
        self.timed = timed
        self.calls: list[PieceCall] = []
        self.counted: dict[Hashable, CallCost] = {}
        """Costs of modules on the meta device by `operations_key`, so that equal modules are counted only once."""
        self.parameters = {piece.module: piece.parameters for piece in found}
        self.tracer = DataflowTracer()
        self.known = ShapeConstants()
        """Mode that knows the values of meta tensors that follow from sizes."""
        self.last: tuple[Any, float] = (), read_clock(cuda=False)
        """Output of the last piece so far, and the time of its end."""
        self._call_counts: Counter[str] = Counter()
        self._hidden: list[str] = []

    def key(self, name: str) -> str:
        """Count one more call of a piece, and return its key."""
        self._call_counts[name] += 1
        key = name if self._call_counts[name] == 1 else f"{name}:{self._call_counts[name]}"
        if not torch.is_grad_enabled():
            self._hidden.append(key)
        return key

    def dependencies(self, values: Any) -> Dependencies:
        """Return the dependencies of values between the pieces. Raises CutError inside of a reentrant checkpoint."""
        if self._hidden and is_reentrant(tensors(values)):
            raise CutError(
                f"{self._hidden[-1]} is called in a reentrant checkpoint of torch, from which a stage would get no "
                "gradient for received values; use checkpoint(..., use_reentrant=False), or recompute=full in the plan"
            )
        return self.tracer.of(values)

    def output(self, values: Any, *, key: str, made: bool = False) -> Any:
        """Return the output of a call as the start of a new graph. `made`: no other object uses its memory."""

        def start(tensor: Tensor) -> Tensor:
            own = self.tracer.register_output(tensor, key=key, made=made)
            return entered(own.requires_grad_()) if own.dtype.is_floating_point else own

        return map_tensors(start, values)

    def probe_result(self, result: Any, everywhere: tuple[str, ...]) -> ProbeResult:
        """Return the record of the run. A block can be split if it is called once, and only its output is used."""
        needed = self.dependencies(result)
        everything = {call.key: [call.dependencies, *(one.dependencies for one in call.inside)] for call in self.calls}

        def can_split(called: PieceCall) -> bool:
            others = [needed, *(one for key, several in everything.items() if key != called.key for one in several)]
            used = {key for one in others for key in one.needs | one.effects}
            return self._call_counts[called.module] == 1 and used.isdisjoint(part.key for part in called.inside[:-1])

        calls = (called if can_split(called) else dataclasses.replace(called, inside=()) for called in self.calls)
        return ProbeResult(tuple(calls), needed, everywhere, frozenset(self.tracer.changed))


@dataclasses.dataclass(eq=False)
class _RecordedForward:
    """Replacement for the forward of a piece that records each call."""

    _name: str
    _module: nn.Module
    _run_record: _RunRecord
    _parts: Sequence[str]
    _shadow: nn.Module | None
    """Copy on the meta device that runs in place of the module, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the piece, record the call, and return the output. Raises CutError if it reads a PackedSequence."""
        if any(isinstance(one, PackedSequence) for one in (*args, *kwargs.values())):
            raise CutError(
                f"{self._name} reads a PackedSequence, which no stage can send. Make the module that packs it a piece, "
                "Options(cut=CutOptions(pieces=('encoder', 'decoder'))), and give parallelize the module itself"
            )
        record, given = self._run_record, (args, kwargs)
        needed, device = record.dependencies(given), device_of(given)
        key = record.key(self._name)
        if self._shadow is None:
            output, called = self._recorded(key, self._module, given)
        else:
            stand_in = partial(map_tensors, partial(torch.zeros_like, device=device))
            inputs = map_tensors(lambda tensor: tensor.to("meta"), given)
            stand_ins = zip(tensors(given), tensors(inputs), strict=True)  # zeros in place of values, so not known
            record.known.forget(b for a, b in stand_ins if b.is_floating_point() or record.tracer.depends_on_pieces(a))
            for one, copy in zip(self._module.modules(), self._shadow.modules(), strict=True):
                # Some models register hooks as they run.
                vars(copy).update((name, value) for name, value in vars(one).items() if "hooks" in name)
            with (
                record.tracer.writing_back_changes(given, copy=inputs, key=key, stand_in=stand_in),
                record.tracer.writing_back_attributes(self._module, copy=self._shadow, key=key, stand_in=stand_in),
                record.known.forward(),
            ):
                try:
                    output, called = self._recorded(key, self._shadow, inputs)
                except RuntimeError as error:
                    raise CutError(
                        f"{key} cannot run without values: {error}\nA model that is given as a function is cut on the "
                        f"meta device. Give the module itself, or let {key} read no values"
                    ) from error
            output = stand_in(output)
        record.calls.append(dataclasses.replace(called, dependencies=needed | called.dependencies))
        output = record.output(output, key=key, made=self._shadow is not None)
        record.last = output, read_clock(cuda=any(tensor.is_cuda for tensor in tensors(output)))
        return output

    def _recorded(self, key: str, module: nn.Module, inputs: tuple[Any, Any]) -> tuple[Any, PieceCall]:
        record, parameters = self._run_record, self._run_record.parameters[self._name]
        if self._parts and not is_repeated():
            block = _BlockRun(self._name, module, record, parts=self._parts)
            output = block.run(*inputs)
            return output, PieceCall(
                key, self._name, parameters, Dependencies(), bytes_of(output), CallCost(0.0, 0.0), inside=block.calls
            )
        return _own_forward(module, record, key=key, name=self._name, parameters=parameters, inputs=inputs)


class _BlockRun:
    """Run of a block in which calls of its modules are recorded like pieces."""

    def __init__(self, name: str, module: nn.Module, record: _RunRecord, *, parts: Sequence[str]) -> None:
        self.calls: tuple[PieceCall, ...] = ()
        self._name, self._module, self._run_record, self._parts = name, module, record, parts
        names = {id(p): own for own, p in zip(record.parameters[name], module.parameters(), strict=True)}
        self._held = {p: tuple(names[id(one)] for one in module.get_submodule(p).parameters()) for p in parts}
        self._found: list[PieceCall] = []
        self._repeated = False

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the block's output, and set `calls` if each module runs exactly once and is not repeated later."""
        inputs, parts = (args, kwargs), {name: self._module.get_submodule(name) for name in self._parts}
        for name, part in parts.items():
            part.forward = partial(self._part, name, part)
        try:
            output = type(self._module).forward(self._module, *args, **kwargs)
        finally:
            for part in parts.values():
                del part.forward
        found = sorted(called.module for called in self._found)
        if not self._repeated and found == sorted(f"{self._name}.{name}" for name in parts):
            needed, same_shape = self._run_record.tracer.of(output), has_input_shape(output, inputs=inputs)
            rest = PieceCall(self._name, self._name, (), needed, bytes_of(output), CallCost(0.0, 0.0), same_shape)
            self.calls = (*self._found, rest)
        return output

    def _part(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module of the block, record the call, and return the output."""
        self._repeated |= is_repeated()
        inputs, record, full = (args, kwargs), self._run_record, f"{self._name}.{name}"
        needed = record.tracer.of(inputs)
        output, called = _own_forward(module, record, key=full, name=full, parameters=self._held[name], inputs=inputs)
        self._found.append(dataclasses.replace(called, dependencies=needed | called.dependencies))
        return record.output(output, key=full)


def _own_forward(
    module: nn.Module, record: _RunRecord, *, key: str, name: str, parameters: tuple[str, ...], inputs: tuple[Any, Any]
) -> tuple[Any, PieceCall]:
    """Run the class's own `forward`; return its result and its call, with the dependencies of the values it used."""
    run, own = partial(type(module).forward, module), list(module.parameters())
    # in the same memory, without their graph
    separate = map_tensors(lambda x: entered(x.detach().requires_grad_()) if x.requires_grad else x, inputs)
    counts = record.timed and any(tensor.is_meta for tensor in (*own, *tensors(separate)))
    kind = operations_key(module, inputs=separate)
    known = record.counted.get(kind) if counts else None
    with record.tracer.inside(key), record.tracer.writing_back_changes(inputs, copy=separate, key=key):
        output, cost = profile_module(run, inputs=separate, parameters=own, timed=record.timed and known is None)
        if known is not None and known.activations != cost.activations:
            output, cost = profile_module(run, inputs=separate, parameters=own, timed=True)
        elif counts:
            cost = record.counted[kind] = known or cost
        used = record.tracer.used
    same_shape = has_input_shape(output, inputs=inputs)
    return output, PieceCall(key, name, parameters, used, bytes_of(output), cost, same_shape)


def _buffers_outside(model: nn.Module, *, pieces: Collection[str]) -> set[tuple[str, Tensor, int]]:
    """Return (name, buffer, version) of each buffer outside of these pieces; a write or replacement changes them."""
    inside_pieces = {one for name in pieces for one in model.get_submodule(name).modules()}
    return {
        (f"{owner}.{name}" if owner else name, buffer, buffer._version)
        for owner, module in model.named_modules()
        if module not in inside_pieces
        for name, buffer in module.named_buffers(recurse=False)
    }


def profile_module(
    run: Callable[..., Any], *, inputs: tuple[Any, Any], parameters: Sequence[Tensor], timed: bool
) -> tuple[Any, CallCost]:
    """Run `run` on `inputs` (args, kwargs); return its output and cost. `timed`: run a backward too, to time it."""
    args, kwargs = inputs
    kept: dict[int, int] = {}
    keep = saved_bytes_hook(kept, parameters=parameters)
    with cost_meter((parameters, inputs), timed=timed) as read:
        begin = read()
        with saved_tensors_hooks(keep, unchanged):
            output = run(*args, **kwargs)
        results = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if timed and results:
            with _gradients_kept(parameters):
                torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        work = read() - begin
    return output, CallCost(sum(kept.values()), work)


def seconds_of_tail(output: Any, *, since: float, result: Any) -> float:
    """Return the seconds after a piece, such as of the loss: from its end `since`, to the backward back to `output`."""
    begins, ends = ([tensor for tensor in tensors(each) if tensor.requires_grad] for each in (output, result))
    if ends and begins:
        torch.autograd.grad(ends, begins, [torch.ones_like(end) for end in ends], allow_unused=True)
    return read_clock(cuda=any(tensor.is_cuda for tensor in begins)) - since


@contextlib.contextmanager
def cost_meter(values: Any, *, timed: bool) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the cost so far: seconds, operations for meta tensors, or 0 without `timed`."""
    inputs = list(tensors(values))
    if not timed:
        yield float
    elif any(tensor.is_meta for tensor in inputs):
        counted = FlopCounterMode(display=False)
        counted.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
        with counted:
            yield lambda: float(counted.get_total_flops())
    else:
        cuda = any(tensor.is_cuda for tensor in inputs)
        yield lambda: read_clock(cuda=cuda)


class _NoModuleTracker(contextlib.nullcontext[None]):
    """Replacement for the module tracker of torch's FLOP counter; torch's fails if a forward computes gradients."""

    parents = frozenset({"Global"})


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the gradients of the parameters at the end of the block."""
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def read_clock(*, cuda: bool) -> float:
    """Return the seconds of a clock; with `cuda`, wait until the GPU has finished its queue.

    On the CPU with one thread of torch, the clock is this thread's processor time, so other load does not count."""
    if cuda:
        streams_of(torch.device("cuda")).synchronize()
    return time.thread_time() if not cuda and torch.get_num_threads() == 1 else time.perf_counter()


def has_input_shape(output: Any, *, inputs: Any) -> bool:
    """Return whether the output is one tensor with the shape and dtype of the first input."""
    first = next(tensors(inputs), None)
    if first is None or not isinstance(output, Tensor):
        return False
    return (output.shape, output.dtype) == (first.shape, first.dtype)


def bytes_of(value: Any) -> int:
    """Return the bytes of a value's tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(value)}.values())


def operations_key(module: nn.Module, *, inputs: Any) -> Hashable:
    """Return a key that is equal for modules with equal operations: classes, attributes, and shapes of all tensors."""
    makes = tuple(  # plain attributes may change a forward
        (type(one), *((name, value) for name, value in vars(one).items() if isinstance(value, int | float | str)))
        for one in module.modules()
    )
    return makes, _kinds(module.parameters()), _kinds(tensors(inputs))


def _kinds(values: Iterable[Tensor]) -> Hashable:
    """Return the shapes and dtypes of these tensors, and whether they require gradients."""
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in values)
