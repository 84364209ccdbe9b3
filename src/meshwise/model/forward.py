"""Run a model's forward and its loss; repeat a forward in the backward, with state and results of the first forward.

An engine that receives the mean of a loss must guess the number of terms. With micro-batches, padding, or unequal
numbers of rows on the ranks, the guess is wrong. So a loss here returns a sum and the number of its terms (tokens,
samples), and the engine divides once, over the whole global batch.

A block whose forward is repeated may keep results that are slow to compute but small: the outputs of matrix products.
Code that computes such a result calls `once(compute)` of a `ForwardReplay`, which other files name `recall`. In a
repeated forward it returns the result of the first one, without computing or communicating.

State that differs between forwards (the samples to draw for, the rows of each rank) is a `RememberedState`. A block
takes a snapshot of the state when it begins, and restores the snapshot when it is repeated."""

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import all_tensors, map_tensors, tensors
from meshwise.model.parameter_units import pattern_of
from meshwise.plan import Plan

Forward: TypeAlias = Callable[[nn.Module, Any], Any]
"""Function of a model and a batch (any tree of tensors) that returns the model's output."""
Loss: TypeAlias = Callable[[Any, Any], tuple[Tensor, Tensor | float]]
"""Function of an output and a batch that returns (sum of the loss, number of terms in the sum)."""


class LossError(ValueError):
    """A loss did not return a scalar sum and the number of terms in the sum."""


class StageForwardLeft(Exception):
    """Raised to leave a model's forward where a pipeline stage ends; the later modules belong to other stages.

    It is an Exception, so torch runs the `always_call` hooks of the modules that are left. If the model catches it, the
    next piece raises it again."""


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call the model on the input part of a batch, and return its output.

    A tensor is the input itself. A tuple or list begins with the input; its other items are for the loss. From a
    mapping, the entries that are parameters of `model.forward` are passed by keyword; all if it takes `**kwargs`.

    Raises ValueError for a mapping if `forward` takes none of its keys."""
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        taken = {key: value for key, value in batch.items() if takes_all or key in parameters}
        if not taken:
            raise ValueError(
                f"none of the batch's keys {sorted(batch)} is a parameter of {type(model).__name__}.forward "
                f"({', '.join(parameters)}); rename them or pass Options(forward=...)"
            )
        return model(**taken)
    if isinstance(batch, tuple | list):
        return model(batch[0])
    return model(batch)


def call_with(model: nn.Module, batch: Any) -> Any:
    """Call the model with `batch`, a pair of positional and of keyword arguments, and return its output."""
    arguments, given = batch
    return model(*arguments, **given)


def no_loss(_output: Any, _batch: Any) -> tuple[Tensor, Tensor | float]:
    """Raise LossError: the trainer was made without a loss."""
    raise LossError("this trainer was made without a loss; pass parallelize(…, loss=loss), or use trainer.open_step")


def call_loss(model: nn.Module, batch: Any, *, forward: Forward, loss: Loss) -> tuple[Tensor, Tensor]:
    """Run forward and loss; return the sum of the loss and the count of its terms, two scalar tensors (count: fp64).

    Raises LossError if `loss` does not return a scalar sum and a count of at least 0. A count in a tensor is not read,
    because that would wait for the GPU. If it is below 0 it becomes NaN, which makes every sum of counts NaN."""
    output = forward(model, batch)
    returned = loss(output, batch)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise LossError(
            f"loss returned {_kind(returned)}; it must return (sum, count): the loss summed over the batch, and the "
            "number of tokens or samples in the sum. A mean m over n samples is (m * n, n)"
        )
    total, count = returned
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.dtype.is_floating_point:
        raise LossError(f"the sum that loss returned is {_kind(total)}; it must be a scalar floating-point tensor")
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise LossError(f"the count that loss returned is {_kind(count)}; it must be one number")
        counted = count.detach().reshape(()).to(device=total.device, dtype=torch.float64)
        counted = counted.masked_fill(counted < 0, math.nan)
    elif isinstance(count, Real) and 0 <= count < math.inf:
        counted = torch.full((), float(count), dtype=torch.float64, device=total.device)  # no copy from the host
    else:
        raise LossError(f"the count that loss returned is {count!r}; it must be a finite number of at least 0")
    return _attached(total.reshape(()), output), counted


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode inside the block, and restore the modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _attached(total: Tensor, output: Any) -> Tensor:
    """Return the loss. If it has no graph, connect it to `output` with gradient 0, so that a backward can run."""
    if torch.is_grad_enabled() and not total.requires_grad:
        for tensor in all_tensors(output):
            if tensor.requires_grad:
                total = total + tensor.reshape(-1)[:0].real.sum().to(total.dtype)
    return total


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple) else type(value).__name__


class RememberedState(Protocol):
    """State that a forward reads and that differs between forwards; a repeated forward restores it."""

    def snapshot(self) -> Any:
        """Return a copy of the current state."""

    def restored(self, place: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the state is `place`, a value that `snapshot` has returned."""


@dataclass
class ReplayTape:
    """Kept results of one block's forward, in the order of their computation."""

    results: list[Any] = field(default_factory=list)
    played: int = 0
    """Number of results that the repeated forward has taken."""


class ForwardReplay:
    """Store of the results and the state that repeated forwards of one model reuse (`recall` in other files)."""

    def __init__(self) -> None:
        self._tape: ReplayTape | None = None
        self._repeats = False
        self._remembered: list[RememberedState] = []

    def remember(self, state: RememberedState) -> None:
        """Add `state` to the states that `snapshot` copies and `restored` restores."""
        self._remembered.append(state)

    def snapshot(self) -> list[Any]:
        """Return a copy of every remembered state, in the order of `remember`."""
        return [state.snapshot() for state in self._remembered]

    @contextlib.contextmanager
    def restored(self, places: list[Any]) -> Iterator[None]:
        """Restore every remembered state inside the block; `places` is a value that `snapshot` has returned."""
        with contextlib.ExitStack() as stack:
            for state, place in zip(self._remembered, places, strict=True):
                stack.enter_context(state.restored(place))
            yield

    @contextlib.contextmanager
    def using(self, tape: ReplayTape | None, *, repeated: bool = False) -> Iterator[None]:
        """Run a forward inside the block. `once` appends results to `tape`, or returns its results if `repeated`.

        Without a tape, `once` only computes."""
        before = self._tape, self._repeats
        self._tape, self._repeats = tape, repeated
        if tape is not None:
            tape.played = 0
        try:
            yield
        finally:
            self._tape, self._repeats = before

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, a tensor or tuple of tensors; in a repeated forward, the kept result."""
        tape = self._tape
        if tape is None:
            return compute()
        if self._repeats and tape.played < len(tape.results):
            tape.played += 1
            return map_tensors(same_memory, tape.results[tape.played - 1])
        with self.using(None):
            result = compute()
        if not self._repeats:
            tape.results.append(map_tensors(same_memory, result))
        return result

    def protect(self, tensor: Tensor) -> None:
        """Copy those kept results that share memory with `tensor`, because it will be written to in place."""
        written, results = tensor.untyped_storage()._cdata, [] if self._tape is None else self._tape.results
        for index, result in enumerate(results):
            if any(one.untyped_storage()._cdata == written for one in tensors(result)):
                results[index] = map_tensors(Tensor.clone, result)


def same_memory(tensor: Tensor) -> Tensor:
    """Return a new tensor in the memory of `tensor`; autograd does not connect the two, not even as a view."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def add_advice(error: Exception, *, model: nn.Module, plan: Plan) -> None:
    """Add notes to an error of a forward under tp or cp: what to change in the model, or a rule for the module."""
    names = {module: name for name, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [owner for owner in owners if not type(owner).__module__.startswith("torch.")]
    called = [owner for owner in owners if isinstance(owner, nn.Module) and names.get(owner)]
    split = [owner for owner in called if any(parameter.dim() > 1 for parameter in owner.parameters())]
    if plan.tp > 1:
        error.add_note(
            "under tp a rank has a part of the heads, and of the features between two matrices. In the forward, use "
            "-1, x.size(…) or an attribute such as self.num_heads in place of a constant; or keep the module whole by "
            f'a rule, {{"{pattern_of(names[split[-1]], module=model) if split else "blocks.*.attention"}": "whole"}}'
            f"{', and take sequence_parallel=0, which gives it all tokens' * plan.sequence_parallel}. "
            "If the error comes with tp=1 too, its cause is the model or the batch."
        )
    if plan.cp > 1 and called and "tokens whole" not in str(error):
        error.add_note(
            "under cp a rank has a part of the tokens. Give the module all tokens by a rule, "
            f'{{"{pattern_of(names[called[-1]], module=model)}": "tokens whole"}}. '
            "If the error comes with cp=1 too, its cause is the model or the batch."
        )
