"""Bounds for the difference between two runs of the same model: 1e-9 in float64, and otherwise the effect of rounding.

In a narrower precision no constant serves. The growth of a rounding error depends on the model. An optimizer that
divides by the size of the gradient, as Adam does, turns the noise of a vanishing gradient into a whole step. So the
growth is measured. Two neighbours train the same model on one process, from parameters that are each moved by one unit
in the last place. By backward error analysis (Higham, Accuracy and Stability of Numerical Algorithms, ch. 1), reordered
sums are exact results for such neighbours. Rounding explains their difference from the reference run, and the plan may
differ as much:

    bound = max(16 eps, 16 · the larger difference)        eps of the narrowest dtype that the forward computes in

An element of a parameter is not compared once its gradient was smaller than 16 times that difference, or, in float64,
than the rounding of the largest gradient. Then rounding may have chosen its direction. An example is the bias of an
attention's keys: its gradient is zero in exact arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.base.tensor_tree import tensors
from meshwise.model.torch_private import TorchDispatchMode
from meshwise.testing.difference import difference, floor, size
from meshwise.testing.reference_run import ReferenceRun, whole
from meshwise.testing.relative_difference import difference, largest_magnitude, rounding_floor

FLOAT64_BOUND = 1e-9
_ROUNDINGS, _MARGIN, _NEIGHBOURS = 16, 16, 2


@dataclass(frozen=True)
class TrialForward:
    """Observations in a forward pass on one process before the comparison.

    | precision   the narrowest floating dtype that the forward computed in
    | where       the operation that first gave this dtype
    | random      whether the same batch gave two losses, or could
    | drew        whether the model drew random numbers of any kind
    | unknown     operations whose draws depend on the plan
    | pooled      a module that takes statistics over a micro-batch, which the plan divides otherwise; empty: none
    """

    precision: torch.dtype
    where: str
    random: bool
    drew: bool
    unknown: tuple[str, ...]
    pooled: str = ""


def try_out(single: ReferenceRun, *, batch: Any) -> TrialForward:
    """Run a batch forward twice, and restore the buffers. Raises any error of the model and the loss."""
    kept = {name: buffer.detach().clone() for name, buffer in single.model.named_buffers()}
    with _Narrowest(single.model) as seen:
        first = single.evaluate(batch)
    second = single.evaluate(batch)
    for name, buffer in single.model.named_buffers():
        buffer.data.copy_(kept[name])
    apart = abs(first - second) > _ROUNDINGS * torch.finfo(seen.dtype).eps * abs(first)
    unknown = tuple(sorted(single.draws.unknown))
    return TrialForward(seen.dtype, seen.where, apart or bool(unknown), single.draws.drew, unknown)


class _Narrowest(TorchDispatchMode):
    """Mode that records the narrowest floating dtype of the tensors that are computed from the parameters.

    Other tensors, such as a count of tokens or a mask, are the same on both sides.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dtype = torch.float64
        self.where = ""
        self._made = WeakTensorKeyDictionary(dict.fromkeys(model.parameters(), None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(tensor in self._made for tensor in tensors((args, kwargs))):
            for tensor in tensors(result):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._made[tensor] = None
                    if torch.finfo(tensor.dtype).eps > torch.finfo(self.dtype).eps:
                        self.dtype, self.where = tensor.dtype, str(func)
        return result


def neighbours(model: nn.Module | Callable[[], nn.Module], *, seed: int, precision: torch.dtype) -> Iterator[nn.Module]:
    """Yield the whole model twice, each time with every parameter's elements moved by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_NEIGHBOURS):
        module = whole(model, seed=seed)
        with torch.no_grad():
            for parameter in module.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
                parameter.mul_(1 + torch.finfo(precision).eps * sign.to(parameter.dtype))
        yield module


@dataclass(frozen=True)
class BoundedDifference:
    """A measured relative difference, its bound, and its step, counted from 1."""

    difference: float
    bound: float
    step: int

    @property
    def over(self) -> bool:
        """True if the difference is over its bound."""
        return self.difference > self.bound

    @property
    def excess(self) -> float:
        """The difference as a multiple of its bound."""
        return self.difference / self.bound if self.bound else math.inf if self.difference else 0.0


@dataclass(frozen=True)
class BoundJudge:
    """Measures differences and their bounds, in a precision."""

    precision: torch.dtype

    @property
    def exact(self) -> bool:
        """True if the bound is a constant; otherwise neighbours measure it."""
        return self.precision == torch.float64

    def floor(self, largest: float) -> float:
        """Return the smallest value that is distinguishable from rounding in a tensor with this largest element."""
        return rounding_floor(largest, bound=FLOAT64_BOUND, dtype=self.precision) if self.exact else 0.0

    def measure(
        self, value: Tensor, *, expected: Tensor, neighbours: Sequence[Tensor], least: float, step: int
    ) -> BoundedDifference:
        """Return the relative difference of `value`, with a bound from the largest difference of the neighbours."""
        found = difference(value, expected, floor=least).relative
        if self.exact:
            return BoundedDifference(found, FLOAT64_BOUND, step)
        spread = max(difference(neighbour, expected, floor=least).relative for neighbour in neighbours)
        return BoundedDifference(found, max(_ROUNDINGS * torch.finfo(self.precision).eps, _MARGIN * spread), step)

    def undecided(self, gradient: Tensor, *, neighbours: Sequence[Tensor], largest: float) -> Tensor | None:
        """Return a mask of the elements whose gradient is so small that rounding may decide its sign; None: no element.

        `largest`: the largest element of all gradients. An optimizer that divides by the size of the gradient takes a
        whole step for such an element. Its parameter is not compared from then on; its gradient still is.
        """
        if self.exact:
            rounding, nonzero = gradient.abs() <= self.floor(largest) * FLOAT64_BOUND, gradient != 0
            if not rounding.all():
                rounding &= nonzero  # a zero among larger gradients is exact
            return rounding if rounding.any() and nonzero.any() else None
        spread = max(largest_magnitude(neighbour - gradient) for neighbour in neighbours)
        return gradient.abs() < _MARGIN * spread

    def __str__(self) -> str:
        if self.exact:
            return f"bound {FLOAT64_BOUND:g}"
        eps = torch.finfo(self.precision).eps
        name = str(self.precision).removeprefix("torch.")
        return f"bound max({_ROUNDINGS} eps, {_MARGIN} x what one eps in the parameters does), eps {eps:.1e} of {name}"
