"""Results of a step: the sums that ranks exchange, the update that follows, and the values for the user."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from meshwise.engine.step_faults import SkipPolicy
from meshwise.model.forward import LossError
from meshwise.precision.dtype_policy import Precision
from meshwise.precision.loss_scale import LossScale


@dataclass(frozen=True)
class StepResult:
    """Result of one step, the same on every rank.

    | loss        sum of the loss over the global batch, divided by its count
    | grad_norm   2-norm of the gradient of that loss over all logical parameters, before clipping
    | tokens      the count that `loss` returned, summed over the global batch
    | seconds     wall time of this rank's step
    | skipped     True when the update was not applied, with the reason in `problem`
    | loss_scale  what the mean loss was multiplied by for the backward (fp16); the other numbers are without it
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool = False
    problem: str | None = None
    loss_scale: float = 1.0


@dataclass(frozen=True)
class EvalResult:
    """The loss over all batches of an evaluation (sum of sums over sum of counts), the same on every rank."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class StepTotals:
    """Sums over the global batch: of the loss, of what it counted, and of the squares of the summed gradient."""

    loss: float
    count: float
    squared: float

    @property
    def mean(self) -> float:
        """The loss per count."""
        return self.loss / self.count if self.count else math.nan

    @property
    def norm(self) -> float:
        """The 2-norm of the averaged gradient."""
        return math.sqrt(self.squared) / self.count if self.count and self.squared >= 0 else math.nan

    @property
    def overflowed(self) -> bool:
        """True if the loss is finite and its gradient is not."""
        return bool(self.count) and math.isfinite(self.mean) and not math.isfinite(self.squared)

    @property
    def problem(self) -> str | None:
        """Why these numbers must not be applied; None when they may."""
        if not self.count:
            return "the loss counted nothing in this step: every rank returned a count of 0"
        if math.isfinite(self.mean) and math.isfinite(self.norm):
            return None
        return f"the loss is {self.mean} and the gradient norm {self.norm}"

    def warn_of_nothing(self, rank: int) -> None:
        """Warn, on the first rank and once, when no parameter has a gradient, which torch makes an error of where one
        process trains.
        """
        if not self.squared and rank == 0:
            warnings.warn(
                "the gradient of every parameter is 0 and nothing is learned: does the model or the loss cut the "
                "graph, by .detach(), .item() or torch.no_grad()?",
                stacklevel=2,
            )


@dataclass(frozen=True)
class UpdateRecipe:
    """Recipe from the gradient of a step to its update."""

    clip_norm: float | None
    nonfinite: SkipPolicy
    precision: Precision
    scale: LossScale | None = None
    """The loss scale of the first step, where the precision needs one."""

    @property
    def early(self) -> bool:
        """True if a unit may be updated before anything is known of the others."""
        return self.nonfinite.ends and self.clip_norm is None and self.scale is None


def check_count(count: float) -> None:
    """Raise LossError for a sum of counts that no loss can have; those that are tensors are looked at there alone."""
    if math.isnan(count):
        raise LossError("a count that loss returned is below 0 or NaN; each must be a finite number of at least 0")
    if not 0 <= count < math.inf:
        raise LossError(f"the counts that loss returned add up to {count}; each must be a finite number of at least 0")
