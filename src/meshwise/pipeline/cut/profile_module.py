"""A part of a model, run on its own: what its forward and its backward take, in time or operations, and in bytes."""

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
from meshwise.pipeline.cut.probe_result import StepCost
from meshwise.pipeline.run.packed_tree import StageEntrance


def profile_module(
    run: Callable[..., Any], *, inputs: tuple[Any, Any], parameters: Sequence[Tensor], timed: bool
) -> tuple[Any, StepCost]:
    """Run a part of a model; its backward too, when it is timed."""
    args, kwargs = inputs
    kept: dict[int, int] = {}
    keep = noting(kept, parameters=parameters)

    with reading((parameters, inputs), timed=timed) as read:
        begin = read()
        with saved_tensors_hooks(keep, unchanged):
            output = run(*args, **kwargs)
        results = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if timed and results:
            with _gradients_kept(parameters):
                torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        work = read() - begin
    return output, StepCost(sum(kept.values()), work)


def cut_off(inputs: Any) -> Any:
    """Return a tree of tensors without what they came from: the same memory."""

    def own(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        entered: Tensor = StageEntrance.apply(tensor.detach().requires_grad_())
        return entered

    return map_tensors(own, inputs)


class LossTail:
    """Cost of the computation after the last step: forward, and backward to the last output."""

    def __init__(self, output: Any) -> None:
        self._from = [tensor for tensor in tensors(output) if tensor.requires_grad]
        self._cuda = any(tensor.is_cuda for tensor in self._from)
        self._begin = now(cuda=self._cuda)

    def to(self, result: Any) -> float:
        """Return the seconds up to here, and of the backward from this result."""
        ends = [tensor for tensor in tensors(result) if tensor.requires_grad]
        if ends and self._from:
            torch.autograd.grad(ends, self._from, [torch.ones_like(end) for end in ends], allow_unused=True)
        return now(cuda=self._cuda) - self._begin


@contextlib.contextmanager
def reading(values: Any, *, timed: bool) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the cost so far: seconds, or operations on the meta device."""
    held = list(tensors(values))
    if not timed:
        yield float
    elif any(tensor.is_meta for tensor in held):
        counted = FlopCounterMode(display=False)
        counted.mod_tracker = _Nowhere()  # type: ignore[assignment]
        with counted:
            yield lambda: float(counted.get_total_flops())
    else:
        cuda = any(tensor.is_cuda for tensor in held)
        yield lambda: now(cuda=cuda)


class _Nowhere(contextlib.AbstractContextManager[None]):
    """Replaces the module tracker of torch's flop counter: that hooks the inputs of modules, and fails where a model
    asks for the gradient of one of them.
    """

    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        """Do nothing: there are no hooks to remove."""


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards the parameters have the gradients that they had before."""
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def now(*, cuda: bool) -> float:
    """Return seconds by some clock, when a GPU, if there is one, has done what it was given.

    Where torch computes with this thread alone, this is the thread's processor time. So a busy machine gives stages as
    even as a quiet one does.
    """
    if cuda:
        streams_of(torch.device("cuda")).synchronize()
    return time.thread_time() if not cuda and torch.get_num_threads() == 1 else time.perf_counter()


def noting(kept: dict[int, int], *, parameters: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a hook on saved tensors that notes the bytes of what is kept, parameters aside.

    The graph holds it, so it leads to nothing that leads to the graph.
    """
    stored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in stored:
            kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # an operation that kept its own result as it is would be kept by it

    return keep


def is_alike(output: Any, *, inputs: Any) -> bool:
    """Return whether a value is one tensor, of the shape and dtype of the first of others."""
    first = next(tensors(inputs), None)
    if first is None or not isinstance(output, Tensor):
        return False
    return (output.shape, output.dtype) == (first.shape, first.dtype)


def size(value: Any) -> int:
    """Return the bytes of a value's tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(value)}.values())


def kind_of(module: nn.Module, *, inputs: Any) -> Hashable:
    """Return a key of a module's operations: its parts, their parameters and its inputs."""
    return *map(_make, module.modules()), _kinds(module.parameters()), _kinds(tensors(inputs))


def _make(module: nn.Module) -> Hashable:
    """Its class, and the numbers and words that its forward may go by."""
    return type(module), *(
        (name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)
    )


def _kinds(values: Iterable[Tensor]) -> Hashable:
    """Return a key of the operations on these tensors."""
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in values)
