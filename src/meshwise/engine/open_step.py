"""A step whose forwards, losses and backwards the caller runs: `Trainer.open_step` opens it.

docs/api.md has an example. `mean` is the mean over the rows of all ranks, and the same number on every rank. Each rank
differentiates its own rows only. So for any loss made from means, `backward` gives the gradient of the whole batch."""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.autograd_collectives import source_of_output
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.data_parallel.data_parallel_engine import leaf_ids
from meshwise.data_parallel.whole_parameter_functions import whole_tensors
from meshwise.engine.microbatch_runner import MicroBatch, WholeModelRunner, gather_rows, placed
from meshwise.engine.step import StepAttempt, TrainingSteps
from meshwise.engine.step_result import StepInputs, StepResult, StepTotals
from meshwise.model.forward import call_loss
from meshwise.model.random_draws import SampleRows
from meshwise.plan import Plan, PlanError


class OpenStep:
    """One optimizer step of a trainer, to be used once, in a `with` block. Every rank calls the same methods.

    `counts`: False if this rank got no rows from the latest `rows` call and computes a copied row. `mean`, `sum`,
    `gather` and `backward` leave such rows out."""

    def __init__(self, steps: TrainingSteps, *, runner: WholeModelRunner, plan: Plan) -> None:
        self.counts = True
        self._steps = steps
        self._runner = runner
        self._engine = runner.engine
        self._world = runner.engine.world
        self._plan = plan
        self._sharder = dataclasses.replace(steps.sharder, runs_empty=True)
        self._rows: MicroBatch | None = None
        self._pending: list[MicroBatch] = []
        self._forwards: dict[WholeModelRunner, int] = {}
        self._size = self._offset = self._backwards = self._digest = 0
        self._value = self._terms = 0.0
        self._reduced = self._ended = False
        self._open = ExitStack()
        self._attempt: StepAttempt | None = None
        self._called: list[CallRecord] = []

    def __enter__(self) -> Self:
        """Begin the step: discard the gradients of the step before."""
        assert self._attempt is None, "an open step is used once"
        self._attempt = self._open.enter_context(self._steps.attempt())
        self._called = self._open.enter_context(self._world.record())
        self._steps.expect_mean()
        self._engine.begin_step()
        self._open.enter_context(self._engine.gatherer.gather_on_use)  # a loss may read parameters
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the step. Raises RuntimeError for a step that was neither updated nor skipped."""
        self._engine.gatherer.free_all()
        self._open.__exit__(kind, error, trace)
        if kind is None and not self._ended:
            raise RuntimeError("the open step ended without an update; call step.update() or step.skip() in its block")

    # ---- forward -----------------------------------------------------------------------------------------------

    def rows(self, batch: Any, *, local: bool = False, total: int | None = None) -> Any:
        """Return this rank's rows of a batch, on this rank's device. Arguments as in `Trainer.step`.

        The forwards that follow compute these rows. A rank without rows gets a copy of another row; see `counts`."""
        [self._rows] = self._sharder.split(batch, local=local, total=total, count=1)
        rows = tree.row_count(batch)
        self._size = (rows * self._sharder.ranks if total is None else total) if local else rows
        self.counts = self._rows.counts
        return placed(self._rows.rows, world=self._world)

    def forward(self, *arguments: Any, **given: Any) -> Any:
        """Return `model(*arguments, **given)` for this rank's rows. May be called several times.

        Random draws (dropout) differ between the forwards of a step, as if each had rows of its own."""
        call = self._runner.task.call
        return self._run(self._runner, lambda model: call(model, (arguments, given)), (arguments, given))

    def through(self, trainer: Any, *arguments: Any, **given: Any) -> Any:
        """Return the output of another trainer's model, such as a discriminator, for this rank's rows.

        The backward of this step runs through that model, and discards its gradients. PlanError for pp."""
        runner = trainer.whole_runner("step.through")
        return self._run(runner, lambda model: runner.task.call(model, (arguments, given)), (arguments, given))

    def loss(self, batch: Any, *, local: bool = False, total: int | None = None) -> Tensor:
        """Return the mean over the global batch of the loss that `parallelize` was given. Arguments as in `step`."""
        rows, task = self.rows(batch, local=local, total=total), self._runner.task
        sums = self._run(self._runner, lambda model: call_loss(model, rows, forward=task.forward, loss=task.loss), rows)
        return self.mean(*sums)

    def mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return the sum of `total` over all ranks, divided by the sum of `count` over them: a scalar, equal on all.

        total: the sum over this rank's rows, a scalar with a graph. count: the number of its terms."""
        terms = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach()
        sums = self.sum(torch.stack([total.double().reshape(()), terms]))
        self._terms += float(sums[1].detach())
        return (sums[0] / sums[1].detach()).to(total.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that split the batch; every rank gets an equal tensor.

        What is computed from it must agree on all ranks. Gradients pass unchanged. A rank without rows adds zeros."""
        own = x if self.counts else x * 0
        return gradient.all_reduce(own, world=self._world, axes=self._plan.loss_axes).wait()

    def gather(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks and the index of this rank's first row; see `Trainer.gather`."""
        return gather_rows(x, world=self._world, axes=self._plan.row_axes, counts=self.counts)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradient of `loss`, a scalar that is the same on every rank: computed from `mean` and `sum`.

        last: no backward follows in this step. Then gradients are reduced during the backward, which is faster.
        Raises ValueError for a loss that depends on a parameter in another way."""
        if self._reduced:
            raise RuntimeError(
                "the gradients of this step are reduced already; call step.backward before step.gradients, norm and "
                "clip, and not after step.backward(loss, last=True)"
            )
        self._refuse_gradients(loss)
        value = float(loss.detach())
        self._value, self._digest = self._value + value, zlib.crc32(repr(value).encode(), self._digest)
        samples = {one.samples for one in self._pending}
        rows = MicroBatch(None, self.counts, samples.pop() if len(samples) == 1 else SampleRows(0, 0))
        with ExitStack() as others:
            for runner in self._forwards.keys() - {self._runner}:
                others.enter_context(runner.backward_of_another())
            self._runner.backward(loss * self._steps.factor, rows=rows, last=last)
        self._pending, self._forwards = [], {}
        self._backwards += 1
        self._reduced = last

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full gradient) of each trainable parameter; changes that the caller makes in place are kept.

        Every rank iterates to the end and makes the same changes. No backward may follow."""
        self._reduce()
        self._require_gradients("step.gradients")
        factor, frozen = self._steps.factor, self._steps.engine.frozen()
        values = {parameter: part for bucket in self._engine.buckets for parameter, part in bucket.gradient_slices()}
        try:
            for name, full in whole_tensors(values, engine=self._engine):
                if not frozen.get(name):
                    full.div_(factor)
                    yield name, full
                    full.mul_(factor)
        finally:
            for bucket in self._engine.buckets:
                bucket.forget_norm()

    def norm(self) -> float:
        """Return the 2-norm of the gradient over all parameters. No backward may follow."""
        self._reduce()
        [squared], _ = self._world.totals(self._engine.squared_norm().reshape(1))
        return float(squared**0.5 / self._steps.factor)

    def clip(self, norm: float) -> float:
        """Scale the gradient down to this 2-norm if it is larger, as torch does; return the norm before."""
        before = self.norm()
        self._require_gradients("step.clip")
        factor = norm / (before + 1e-6)
        if factor < 1.0:
            self._engine.scale_gradients(factor)
        return before

    # ---- update ------------------------------------------------------------------------------------------------

    def update(self) -> StepResult:
        """Update the parameters; return the result: `loss` is the sum of all losses, `tokens` of all counts of `mean`.

        `Options` (clip_norm, nonfinite) apply as in `Trainer.step`. Raises NonFiniteError and RanksDisagree as there,
        and RanksDisagree when the ranks' losses differ."""
        self._refuse_gradients()
        attempt = self._finish()
        squared, axes = self._engine.squared_norm().reshape(1), self._world.mesh.names
        inputs = StepInputs(self._digest, 0, tuple(self._called), loss=self._value)
        [total] = self._steps.summed(squared, inputs=inputs, equal=self._plan.loss_axes, axes=axes)
        self._steps.decide(attempt, totals=StepTotals(self._value, 1.0, total / self._steps.factor**2))
        return self._result(attempt)

    def skip(self) -> StepResult:
        """Leave the parameters as they are, and discard the gradients; the result says `skipped`."""
        attempt = self._finish()
        attempt.totals, attempt.problem = StepTotals(self._value, 1.0, 0.0), "step.skip() was called"
        return self._result(attempt)

    def _finish(self) -> StepAttempt:
        assert self._attempt is not None, "an open step is used in a with block"
        if self._ended:
            raise RuntimeError("this step has ended; open another one: with trainer.open_step() as step")
        self._reduce()
        self._runner.finish()
        self._ended = True
        return self._attempt

    def _result(self, attempt: StepAttempt) -> StepResult:
        return dataclasses.replace(attempt.result(), tokens=int(self._terms))

    def _reduce(self) -> None:
        """Sum the gradients over the ranks, unless the backwards have done so."""
        if not self._reduced and not (self._backwards and self._engine.reduction.shards_gradients):
            self._engine.reduce()
            self._engine.settle()
        elif not self._reduced:
            self._engine.reduce_replicas()
        self._reduced = True

    def _refuse_gradients(self, loss: Tensor | None = None) -> None:
        """Raise for gradients that the step would leave out (in `.grad`) or add up (terms of `loss` outside `mean`)."""
        axes, leaves = self._plan.loss_axes, set[int]()
        if loss is not None and self._world.group(axes).size > 1:
            leaves = leaf_ids(loss, until=lambda node: source_of_output(node) == ("replicated", tuple(axes))) or leaves
        for name, parameter in self._engine.module.named_parameters():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{name!r} has a .grad that step.backward did not make, and the step would leave it out; call "
                    "step.backward(loss) instead of loss.backward(), and change gradients by step.gradients()"
                )
            if id(parameter) in leaves:
                raise ValueError(
                    f"the loss depends on {name!r} outside of step.mean, so gradients of all ranks would be added up. "
                    "Pass every term as step.mean(loss_sum, count) or, if ranks have equal ones, step.mean(term, 1)"
                )

    def _require_gradients(self, what: str) -> None:
        if what == "step.gradients" and any(bucket.local for bucket in self._engine.buckets):
            raise PlanError("step.gradients needs summed gradients, but the optimizer exchanges momenta; use AdamW")
        if self._engine.tiers.is_offloaded("gradients"):
            raise PlanError(
                f"{what} reads and changes gradients, but offload={self._plan.offload} moves them to another tier; "
                "leave gradients out of offload, and clip with Options(clip_norm=…)"
            )

    def _run(self, runner: WholeModelRunner, call: Callable[[nn.Module], Any], inputs: Any) -> Any:
        """Run a forward of this or another model, and note which samples it computes."""
        rows = self._numbered(inputs)
        before = self._forwards.get(runner, 0)
        if torch.is_grad_enabled():
            self._pending.append(rows)
            self._forwards[runner] = before + 1
        return runner.forward(call, rows=rows, first=before == 0)

    def _numbered(self, inputs: Any) -> MicroBatch:
        """Return sample numbers for a forward's random draws; no earlier forward of this step used them.

        If the inputs have as many rows as `rows` returned, use their numbers. Else assume equal counts on all ranks."""
        count = next((len(tensor) for tensor in tree.tensors(inputs) if tensor.dim()), 1)
        if self._rows is not None and self._rows.samples.count == count:
            samples, size = self._rows.samples, self._size
        else:
            size = count * self._sharder.ranks
            samples = dataclasses.replace(self._sharder, weights=None).shards(size).samples(0, count=1)
        offset, self._offset = self._offset, self._offset + size
        return MicroBatch(None, self.counts, samples.shifted(offset))
