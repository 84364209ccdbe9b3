"""Run a module on given inputs, and measure its forward and backward: time (or operations) and saved bytes."""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.streams import streams_of
from meshwise.pipeline.cut.dataflow import unchanged
from meshwise.pipeline.cut.probe_result import CallCost
from meshwise.pipeline.run.packed_tree import StageEntrance


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


def detached_inputs(inputs: Any) -> Any:
    """Return the inputs in the same memory without their graph; `requires_grad` stays as it was."""

    def own(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        entered: Tensor = StageEntrance.apply(tensor.detach().requires_grad_())
        return entered

    return map_tensors(own, inputs)


class LossTail:
    """Stopwatch for the computation after a piece, such as the loss: its forward, and its backward to the piece."""

    def __init__(self, output: Any) -> None:
        """Start the stopwatch. `output`: the output of the piece."""
        self._from = [tensor for tensor in tensors(output) if tensor.requires_grad]
        self._cuda = any(tensor.is_cuda for tensor in self._from)
        self._begin = read_clock(cuda=self._cuda)

    def to(self, result: Any) -> float:
        """Run the backward from `result` to the piece's output, and return the seconds since the start."""
        ends = [tensor for tensor in tensors(result) if tensor.requires_grad]
        if ends and self._from:
            torch.autograd.grad(ends, self._from, [torch.ones_like(end) for end in ends], allow_unused=True)
        return read_clock(cuda=self._cuda) - self._begin


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


class _NoModuleTracker(contextlib.AbstractContextManager[None]):
    """Replacement for the module tracker of torch's FLOP counter; torch's fails if a forward computes gradients."""

    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        """Do nothing: there are no hooks to remove."""


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


def saved_bytes_hook(kept: dict[int, int], *, parameters: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a pack hook that writes the bytes of each saved storage to `kept`, by the storage's address.

    Storages of `parameters` are left out. The graph keeps the hook alive, so the hook must not hold the graph."""
    stored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in stored:
            kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # `tensor` itself would keep alive the operation that saved it: a cycle

    return keep


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
