"""Prepare the user's model, loss and batches for a verification (`VerificationInputs`)."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.base.tensor_tree import map_tensors
from meshwise.data_parallel.batch_norm_statistics import batch_norms
from meshwise.engine.parallelize import Options
from meshwise.model.find_mixtures import compute_experts_by_loops
from meshwise.model.forward import Loss, default_forward
from meshwise.model.module_copy import copy_with_hooks
from meshwise.precision.dtype_policy import Precision
from meshwise.precision.loss_scale import LossScale
from meshwise.testing.reference_run import ReferenceRun
from meshwise.verify.output_mean_squares import OutputMeanSquares
from meshwise.verify.rounding_bounds import TrialForward, try_out

Model = nn.Module | Callable[[], nn.Module]
"""A module, or a function that makes one."""


@dataclass(frozen=True)
class VerificationInputs:
    """The model, loss, batches and settings of one call of `verify`, used by both sides.

    | dtype          dtype to which model and batches are converted; None: they keep theirs
    | training       keywords of `parallelize`: the optimizer, its arguments, the options
    | precision      dtypes of computation, masters and gradients on both sides
    | local          True if every rank draws its own random numbers (`random=local`)
    | microbatches   micro-batches of each rank's rows under the plan; the reference run has one
    | evaluating     True if the model is compared in eval mode"""

    model: Model
    loss: Loss
    batches: Sequence[Any]
    dtype: torch.dtype | None
    training: Mapping[str, Any]
    precision: Precision = dataclasses.field(default_factory=Precision)
    local: bool = False
    microbatches: int = 1
    evaluating: bool = False

    @property
    def options(self) -> Options:
        """Options of both sides. A gradient that is not finite raises an error, so the loss scale is only 256."""
        options = self.training.get("options") or Options()
        return dataclasses.replace(options, nonfinite="raise", precision=self.precision, loss_scale=LossScale(256.0))

    def prepared(self) -> Model:
        """Return the model in the comparison's dtype and mode: a copy of the module, or a function that makes one."""

        def build() -> nn.Module:
            module = copy_with_hooks(self.model) if isinstance(self.model, nn.Module) else self.model()
            if self.evaluating:
                module.eval()
            if self.dtype == torch.float64:
                compute_experts_by_loops(module)
            return module if self.dtype is None else module.to(self.dtype)

        return build() if isinstance(self.model, nn.Module) else build

    def converted(self) -> Iterator[Any]:
        """Yield the batches, with floating tensors in the dtype of the comparison."""
        dtype = self.dtype
        for batch in self.batches:
            yield map_tensors(lambda x: x.to(dtype) if dtype and x.is_floating_point() else x, batch)

    def arguments(self, outputs: OutputMeanSquares) -> dict[str, Any]:
        """Return keywords of `parallelize` and `ReferenceRun`: loss, optimizer, options. `outputs`: runs forwards."""
        example = next(self.converted()) if self.options.example is None else self.options.example
        options = dataclasses.replace(self.options, forward=outputs.forward, example=example)
        return {**self.training, "loss": self.loss, "options": options}

    def listener(self) -> OutputMeanSquares:
        """Return a new `OutputMeanSquares` for this model's forward."""
        return OutputMeanSquares(self.options.forward or default_forward)

    def try_out(self, device: torch.device) -> TrialForward:
        """Run the first batch forward twice on one process, on `device`; if the results are random, again in eval mode.

        Raises ValueError if the losses differ in eval mode too. Raises any error of model and loss."""
        single = ReferenceRun(self.prepared(), device=device, **self.arguments(self.listener()))
        quietly = dataclasses.replace(self, evaluating=True)
        pooled = [name for name, norm in batch_norms(single.model).items() if norm.training]
        if pooled and self.microbatches > 1:
            return dataclasses.replace(quietly.try_out(device), pooled=pooled[0])
        trial = try_out(single, batch=next(self.converted()))
        if not trial.random and not (self.local and trial.drew):
            return trial
        if self.evaluating:
            raise ValueError(
                "the same batch gives two different losses, in eval mode too. To be compared, forward and loss must be "
                "functions of the parameters and the batch: remove random numbers, or seed them from the batch"
            )
        return dataclasses.replace(quietly.try_out(device), random=True, unknown=trial.unknown)

    def coarsest(self, trial: TrialForward) -> torch.dtype:
        """Return the dtype with the largest rounding error: of the forward, or of summing or accumulating gradients."""
        dtypes = (trial.precision, self.precision.reduction, self.precision.accumulation)
        return max((dtype for dtype in dtypes if dtype), key=lambda dtype: torch.finfo(dtype).eps)

    def notes(self, trial: TrialForward) -> Iterator[str]:
        """Yield the notes of the report, such as the reason for eval mode."""
        if trial.pooled:
            yield (
                f"note: {trial.pooled} computes statistics of each micro-batch, and the plan cuts a batch into "
                f"{self.microbatches}; the model was compared in eval mode, without these statistics"
            )
        elif self.evaluating:
            whose = "with random=local every rank draws its own" if self.local else "these depend on the plan"
            names = f" ({', '.join(trial.unknown)})" if trial.unknown else ""
            yield (
                f"note: the model draws random numbers in training{names}, and {whose}; it was compared in eval mode, "
                "without random numbers"
            )
        if self.dtype is not None and trial.precision != self.dtype:
            name = str(trial.precision).removeprefix("torch.")
            yield f"note: the forward computes in {name} (first in {trial.where}), which sets the bound"
