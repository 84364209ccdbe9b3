"""Prepare the user's model, loss and batches for a comparison."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.base.tensor_tree import map_tensors
from meshwise.data_parallel.batch_statistics import batch_norms
from meshwise.engine.parallelize import Options
from meshwise.model.forward import Loss, default_forward
from meshwise.model.module_copy import duplicate
from meshwise.precision.dtype_policy import Precision
from meshwise.precision.loss_scale import LossScale
from meshwise.testing.reference_run import ReferenceRun
from meshwise.verify.module_outputs import OutputNorms
from meshwise.verify.rounding_bounds import TrialForward, try_out

Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class VerifiedSubject:
    """A model and its training, as `verify` got them.

    precision    the dtypes of both sides
    dtype        what model and batches are converted to; None leaves them as they are
    local        whether the plan has every rank draw its own random numbers
    microbatches how many the plan makes of each batch; one process makes one
    evaluating   whether the model is compared in eval mode
    training     keywords of `parallelize`: the optimizer, its arguments, the options
    """

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
        """The options of the training; a step that is not finite is an error, so no loss is scaled by much."""
        options = self.training.get("options") or Options()
        return dataclasses.replace(options, nonfinite="raise", precision=self.precision, loss_scale=LossScale(256.0))

    def prepared(self) -> Model:
        """Return the model in the dtype and mode to compare in; a module is copied, since training would change it."""

        def build() -> nn.Module:
            module = duplicate(self.model) if isinstance(self.model, nn.Module) else self.model()
            if self.evaluating:
                module.eval()
            return module if self.dtype is None else module.to(self.dtype)

        return build() if isinstance(self.model, nn.Module) else build

    def converted(self) -> Iterator[Any]:
        """Yield the batches, their floating tensors in the dtype to compare in."""
        dtype = self.dtype
        for batch in self.batches:
            yield map_tensors(lambda x: x.to(dtype) if dtype and x.is_floating_point() else x, batch)

    def arguments(self, outputs: OutputNorms) -> dict[str, Any]:
        """Return the keywords of `parallelize` and of `ReferenceRun`, with a forward that `outputs` listens to."""
        example = next(self.converted()) if self.options.example is None else self.options.example
        options = dataclasses.replace(self.options, forward=outputs.forward, example=example)
        return {**self.training, "loss": self.loss, "options": options}

    def listener(self) -> OutputNorms:
        """Return an `OutputNorms` for this model's forward."""
        return OutputNorms(self.options.forward or default_forward)

    def try_out(self, device: torch.device) -> TrialForward:
        """Run the first batch forward on one process, on `device`.

        Raises ValueError when it gives two losses, in eval mode too, and what the model and the loss raise.
        """
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
        """Return the dtype that rounds most, of those that the forward computes in and those that gradients go
        through.
        """
        dtypes = (trial.precision, self.precision.reduction, self.precision.accumulation)
        return max((dtype for dtype in dtypes if dtype), key=lambda dtype: torch.finfo(dtype).eps)

    def notes(self, trial: TrialForward) -> Iterator[str]:
        """Yield notes on the comparison for the reader of the report."""
        if trial.pooled:
            yield (
                f"note: {trial.pooled} takes statistics over a micro-batch, and the plan makes {self.microbatches} of "
                "a batch, which are other statistics; the model was compared in eval mode, without them"
            )
        elif self.evaluating:
            whose = "with random=local every rank draws its own" if self.local else "those depend on the plan"
            names = f" ({', '.join(trial.unknown)})" if trial.unknown else ""
            yield (
                f"note: the model draws random numbers while it trains{names}, and {whose}, so that plans differ in "
                "them; it was compared in eval mode, without them"
            )
        if self.dtype is not None and trial.precision != self.dtype:
            name = str(trial.precision).removeprefix("torch.")
            yield f"note: the forward computes in {name} (first in {trial.where}), which sets the bound"
