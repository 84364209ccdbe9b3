"""Bounds for the difference between two runs of a model: 1e-9 in float64, otherwise measured from rounding.

In a narrower precision no constant bound is right, because the growth of a rounding error depends on the model. An
optimizer that divides by the size of the gradient, as Adam does, turns the noise of a vanishing gradient into a full
update. So the growth is measured: two neighbours train the same model on one process, from initial parameters that are
each moved by one unit in the last place. By backward error analysis (Higham, Accuracy and Stability of Numerical
Algorithms, ch. 1), reordered sums are exact results for such neighbours. So rounding explains the difference between a
neighbour and the reference run, and the plan may differ as much:

    bound = max(16 eps, 16 · the larger difference of both neighbours)      eps of the narrowest dtype in the forward

If a gradient is small, rounding may choose the direction of its update. Small means: up to 16 times the difference of
the neighbours; in float64, up to the rounding of the largest gradient. After such an update, that element of the
parameter is not compared. An example is the bias of an attention's keys, whose exact gradient is zero."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.base.tensor_tree import tensors
from meshwise.model.torch_private import TorchDispatchMode
from meshwise.testing.reference_run import ReferenceRun, whole
from meshwise.testing.relative_difference import difference, largest_magnitude, rounding_floor

FLOAT64_BOUND = 1e-9
"""Bound of every relative difference in float64."""
_ROUNDINGS, _MARGIN, _NEIGHBOURS = 16, 16, 2


@dataclass(frozen=True)
class TrialForward:
    """Facts found by forward passes on one process, before the comparison.

    | precision   the narrowest floating dtype in which the forward computed
    | where       name of the first operation with a result of this dtype
    | random      True if two passes of one batch gave different losses, or if some draws depend on the plan
    | drew        True if the model drew random numbers of any kind
    | unknown     operations whose random numbers depend on the plan
    | pooled      name of a module whose statistics over the batch depend on the micro-batches; empty if there is none
    """

    precision: torch.dtype
    where: str
    random: bool
    drew: bool
    unknown: tuple[str, ...]
    pooled: str = ""


def try_out(single: ReferenceRun, *, batch: Any) -> TrialForward:
    """Run a batch forward twice, restore the buffers, and return the facts. Raises any error of model and loss."""
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
    """Dispatch mode that records the narrowest floating dtype of the tensors that are computed from parameters.

    Other tensors, such as a count of tokens or a mask, are equal on both sides."""

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
    """Yield two copies of the model; each element of a parameter is moved up or down by eps of `precision`."""
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
    """A measured relative difference, its bound, and its step, counted from 1 (0: before the first step)."""

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
    """Rules for differences and bounds. `precision`: the dtype with the largest rounding error on either side."""

    precision: torch.dtype

    @property
    def exact(self) -> bool:
        """True if the bound is a constant; otherwise neighbours measure it."""
        return self.precision == torch.float64

    @property
    def least_gap(self) -> float:
        """Relative gap between two scores below which rounding may decide which of them is the larger one."""
        return FLOAT64_BOUND / 1000 if self.exact else _ROUNDINGS * torch.finfo(self.precision).eps

    def floor(self, largest: float) -> float:
        """Return the scale below which a tensor is only rounding; 0 unless `exact`. `largest`: its family's largest."""
        return rounding_floor(largest, bound=FLOAT64_BOUND, dtype=self.precision) if self.exact else 0.0

    def measure(
        self, value: Tensor, *, expected: Tensor, neighbours: Sequence[Tensor], least: float, step: int
    ) -> BoundedDifference:
        """Return the relative difference of `value` from `expected`, with the bound that the neighbours give.

        `neighbours`: the same tensor in the neighbours' runs; not used if `exact`. `least`: the scale from `floor`."""
        found = difference(value, expected, floor=least).relative
        if self.exact:
            return BoundedDifference(found, FLOAT64_BOUND, step)
        spread = max(difference(neighbour, expected, floor=least).relative for neighbour in neighbours)
        return BoundedDifference(found, max(_ROUNDINGS * torch.finfo(self.precision).eps, _MARGIN * spread), step)

    def undecided(self, gradient: Tensor, *, neighbours: Sequence[Tensor], largest: float) -> Tensor | None:
        """Return a mask of the elements whose gradient is so small that rounding may decide its sign; None: no element.

        `neighbours`: the gradient in the neighbours' runs. `largest`: largest magnitude of all gradients. For such an
        element, an optimizer that divides by the size of the gradient makes a full update. The caller then no longer
        compares this element of the parameter, but still its gradient."""
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
        return f"bound max({_ROUNDINGS} eps, {_MARGIN} x effect of one eps in the parameters), eps {eps:.1e} of {name}"
