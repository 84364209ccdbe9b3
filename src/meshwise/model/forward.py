"""Run a model's forward and its loss, which returns a sum and a count.

An engine that receives the mean of a loss must guess its count. Micro-batches, padding and ranks of unequal shares all
make the guess wrong. So a loss here returns its sum and what it counted (tokens, samples), and the division is done
once, over the whole global batch.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import reachable

Forward: TypeAlias = Callable[[nn.Module, Any], Any]
Loss: TypeAlias = Callable[[Any, Any], tuple[Tensor, Tensor | float]]


class LossError(ValueError):
    """A loss did not return the sum of what it measured and the count of what it summed."""


class StageForwardLeft(Exception):
    """Raised to leave a forward where a pipeline's stage ends: the rest belongs to other stages.

    It is an Exception so that torch runs the hooks registered with `always_call` of the modules it leaves. If a model
    catches it, the next piece raises it again.
    """


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call the model on its part of a batch.

    A tensor is the input. Of a tuple or list the first item is the input and the rest is for the loss. Of a mapping,
    the entries named like parameters of `model.forward` are passed by keyword (all, when it takes `**kwargs`).

    Raises ValueError for a mapping none of whose keys `forward` takes.
    """
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


def call_loss(model: nn.Module, batch: Any, *, forward: Forward, loss: Loss) -> tuple[Tensor, Tensor]:
    """Run forward and loss, and return the sum of the loss and the count: two scalar tensors, the count in fp64.

    Raises LossError when `loss` does not return a scalar sum and a count of at least 0. A tensor's count is not read
    here, because that would wait for a GPU; below 0 it becomes NaN, which stays NaN in every sum.
    """
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
        counted = torch.tensor(float(count), dtype=torch.float64, device=total.device)
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
    """Return the loss, with a gradient of zero where it has none: every rank must run a backward."""
    if torch.is_grad_enabled() and not total.requires_grad:
        for tensor in reachable(output):
            if tensor.requires_grad:
                total = total + tensor.reshape(-1)[:0].real.sum().to(total.dtype)
    return total


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple) else type(value).__name__
