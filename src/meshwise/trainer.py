"""The Trainer: one step of a parallelized model, and what can be asked of it afterwards.

A step takes a batch, runs forward and backward of this rank's micro-batches, and exchanges four numbers with the other
ranks once: the sum of the loss, its count, the squared norm of the gradient, and a digest of the collectives called.
With them every rank divides, clips, updates and refuses alike, and gradients of ranks that disagreed are never applied.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise import tree
from meshwise.checkpoint.save import Saving
from meshwise.checkpoint.training import Restored, TrainingState
from meshwise.comm.journal import RanksDisagree, Stamp, disagreement
from meshwise.comm.world import World
from meshwise.data_parallel.engine import DataParallel, throw_away
from meshwise.layout.geometry import even_split
from meshwise.mesh import Mesh
from meshwise.microbatch import Deal, MicroBatch, micro_batches
from meshwise.model.draws import Draws
from meshwise.model.forward import Forward, Loss, call_loss, eval_mode
from meshwise.model.table import ParameterTable, Row
from meshwise.nonfinite import NonFiniteError, SkipPolicy, culprits
from meshwise.optim.flat import state_bytes
from meshwise.plan import Plan

Sums: TypeAlias = tuple[Tensor, Tensor]
"""The sum of a loss and its count: two fp64 scalars on the device."""


@dataclass(frozen=True)
class StepResult:
    """What one step came to, the same on every rank.

    loss        sum of the loss over the global batch, divided by its count
    grad_norm   2-norm of the gradient of that loss over all logical parameters, before clipping
    tokens      the count that `loss` returned, summed over the global batch
    seconds     wall time of this rank's step
    skipped     True when the update was not applied, with the reason in `problem`
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class EvalResult:
    """The loss over all batches of an evaluation (sum of sums over sum of counts), the same on every rank."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class Totals:
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
    def problem(self) -> str | None:
        """Why these numbers must not be applied; None when they may."""
        if not self.count:
            return "the loss counted nothing in this step: every rank returned a count of 0"
        if math.isfinite(self.mean) and math.isfinite(self.norm):
            return None
        return f"the loss is {self.mean} and the gradient norm {self.norm}"


@dataclass(frozen=True)
class Recipe:
    """How the numbers of a step are made from a model and a batch."""

    forward: Forward
    loss: Loss
    clip_norm: float | None
    nonfinite: SkipPolicy
    draws: Draws


class Trainer:
    """A model under a plan. `parallelize` makes it."""

    def __init__(self, engine: DataParallel, *, plan: Plan, recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self._engine = engine
        self._recipe = recipe
        self._state = TrainingState(engine, optimizer=optimizer, plan=plan)
        self._axes = plan.data_axes
        self._draws = recipe.draws
        self._steps = 0
        self._skips = 0
        self._clipped = 1.0
        self._rows_meet = engine.world.group(plan.data_axes).size > engine.world.group("dp").size
        self._lockstep = self._rows_meet or any(unit.at_rest for unit in engine.units)

    @property
    def model(self) -> nn.Module:
        """The user's module; under zero=3 its parameters are whole only while it runs."""
        module: nn.Module = self._engine.module
        return module

    @property
    def table(self) -> ParameterTable:
        """One row for each logical parameter."""
        return self._engine.table

    @property
    def world(self) -> World:
        """What joins the ranks."""
        return self._engine.world

    # ---- training ----------------------------------------------------------------------------------------------

    def share(self, size: int) -> tuple[int, int]:
        """[start, stop) of the rows that this rank takes of a global batch of `size` rows."""
        group = self.world.group(self._axes)
        return even_split(size, group.size)[group.index]

    def step(self, batch: Any, *, local: bool = False, total: int | None = None) -> StepResult:
        """One optimizer step on a batch: a tree of tensors whose dim 0 counts the samples.

        `batch` is the global batch, the same on every rank, of which each rank takes its share; with `local=True` it
        is this rank's part already, and may have no rows. Rows that do not divide evenly are fine. Dropout goes by the
        number of a row in the global batch, and so has to know of a local part how many rows there are in `total`, cut
        as `share` says; by default all parts are as long as this one.

        Raises NonFiniteError when the loss or the gradient is not finite and the policy says so, RanksDisagree when
        the ranks called different collectives, LossError when `loss` does not return (sum, count).
        """
        started = time.perf_counter()
        self._engine.check_parameters()
        parts = self._micro_batches(batch, local=local, parts=self.plan.microbatches, total=total)
        self._draws.begin(self._steps)
        self._steps += 1
        random_state = torch.get_rng_state()
        with self.world.record() as called:
            self._engine.begin_step()
            sums = self._accumulate(parts)
            self._draws.finish()
            totals = self._exchange(sums, called)
        problem = totals.problem
        if problem is None:
            self._skips = 0
            self._update(totals)
        else:
            torch.set_rng_state(random_state)
            if totals.count:
                problem += culprits(self._engine, run=lambda arrival: self._inspect(parts, arrival))
            self._skips += 1
            if self._skips > self._recipe.nonfinite.most:
                raise NonFiniteError(problem + self._recipe.nonfinite.advice)
        seconds = time.perf_counter() - started
        return StepResult(totals.mean, totals.norm, int(totals.count), seconds, problem is not None, problem)

    def evaluate(self, batches: Iterable[Any], *, local: bool = False) -> EvalResult:
        """The loss over `batches` without training, the model in eval mode. Every rank passes as many batches."""
        total, tokens = self._zeros()
        with torch.no_grad(), eval_mode(self.model):
            for batch in batches:
                loss, count = self._forward(self._micro_batches(batch, local=local, parts=1))
                total += loss
                tokens += count
        sums = torch.stack([total, tokens])
        self.world.all_reduce(sums, axes=self._axes).wait()
        loss_sum, count_sum = sums.tolist()
        return EvalResult(loss_sum / count_sum if count_sum else math.nan, int(count_sum))

    def predict(self, batch: Any) -> Any:
        """What the model makes of this rank's `batch`, without gradients and in eval mode.

        Every rank calls it as often as the others: the parameters may have to be gathered.
        """
        with torch.no_grad(), eval_mode(self.model), self._engine.gatherer.guard:
            output = self._recipe.forward(self.model, self._begin_forward(batch))
        self._engine.gatherer.rest()
        return output

    def _update(self, totals: Totals) -> None:
        clip = self._recipe.clip_norm
        self._clipped = 1.0 if clip is None else min(1.0, clip / (totals.norm + 1e-6))
        self._engine.scale_gradients(self._clipped / totals.count)
        for bucket in self._engine.buckets:
            bucket.lend_gradients()
        self.optimizer.step()
        self._engine.publish()

    # ---- micro-batches -----------------------------------------------------------------------------------------

    def _micro_batches(self, batch: Any, *, local: bool, parts: int, total: int | None = None) -> list[MicroBatch]:
        """This rank's rows, cut. Raises ValueError when a local part is not this rank's of `total` rows."""
        group, rows = self.world.group(self._axes), tree.rows(batch)
        size = rows if not local else rows * group.size if total is None else total
        deal = Deal.of(size, ranks=group.size, index=group.index)
        start, stop = deal.shares[group.index]
        if local and stop - start != rows:
            raise ValueError(f"this rank's part has {rows} rows; of {total} in total, share() gives it {stop - start}")
        return micro_batches(batch, deal=deal, parts=parts, lockstep=self._lockstep, offset=start if local else 0)

    def _accumulate(self, parts: Sequence[MicroBatch]) -> Sums:
        """Forward and backward of every micro-batch; the loss and the count of this rank."""
        total, tokens = self._zeros()
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            if part.rows is None:
                self._engine.backward(None, last=last)
                continue
            with self._draws.running(part.samples):
                loss, count = self._run(part.rows)
            # Where the ranks share out the rows of one product, what a spare row gives would reach the others, and what
            # the others' rows give reaches this rank.
            keep = part.counts or self._rows_meet
            with self._draws.running(part.samples, again=True):
                self._engine.backward(loss if part.counts else loss * 0, last=last, keep=keep)
            if part.counts:
                total += loss.detach().double()
                tokens += count
        return total, tokens

    def _forward(self, parts: Sequence[MicroBatch]) -> Sums:
        """Forward of every micro-batch; the loss and the count of this rank."""
        total, tokens = self._zeros()
        for part in parts:
            if part.rows is not None:
                loss, count = self._run(part.rows)
                if part.counts:
                    total += loss.double()
                    tokens += count
        return total, tokens

    def _inspect(self, parts: Sequence[MicroBatch], arrival: Callable[[int, Row, Tensor], None]) -> None:
        """Forward and backward of every micro-batch again, for its gradients to be looked at."""
        for number, part in enumerate(parts):
            if part.rows is not None:
                with self._draws.running(part.samples):
                    loss, _ = self._run(part.rows)
                see = functools.partial(arrival, number) if part.counts or self._rows_meet else throw_away
                if loss.requires_grad:
                    with self._draws.running(part.samples, again=True):
                        self._engine.inspect(loss if part.counts else loss * 0, arrival=see)
        self._engine.gatherer.rest()

    def _run(self, rows: Any) -> Sums:
        """Forward and loss of one micro-batch: (sum, count), scalars on the device."""
        with self._engine.gatherer.guard:
            return call_loss(
                self.model, self._begin_forward(rows), forward=self._recipe.forward, loss=self._recipe.loss
            )

    def _begin_forward(self, rows: Any) -> Any:
        """Begin a pass over the model; the rows, on the device."""
        self._engine.gatherer.begin(backward=False)
        return tree.map_tensors(lambda tensor: tensor.to(self.world.device, non_blocking=True), rows)

    def _exchange(self, sums: Sums, called: list[Stamp]) -> Totals:
        """Sum loss, count and squared norm over the ranks, and make sure that they called the same collectives.

        Ranks with the same rows of the batch have the same loss; the first of them speaks for all.
        """
        world, before = self.world, list(called)
        others = [axis for axis in world.mesh.names if axis not in self._axes]
        if world.group(others).index > 0:
            sums = self._zeros()
        own = torch.tensor(float(world.dissent), dtype=torch.float64, device=world.device)
        numbers = torch.stack([*sums, self._engine.squared_norm(), own])
        world.all_reduce(numbers, axes=world.mesh.names).wait()
        loss, count, squared, dissent = numbers.tolist()
        if dissent:
            raise RanksDisagree(_first_disagreement(world.mesh, dict(world.exchange((world.rank, before)))))
        return Totals(loss, count, squared)

    def _zeros(self) -> Sums:
        loss, count = torch.zeros(2, dtype=torch.float64, device=self.world.device).unbind()
        return loss, count

    # ---- the whole of things -----------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, in table order. Every rank must iterate to the end.

        The tensor is the caller's only until the next one: copy what is to be kept.
        """
        return self._engine.full_parameters()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full gradient) of the last step, averaged, before clipping. Every rank iterates to the end.

        Raises RuntimeError when the last step was skipped: what its gradients hold is not finite.
        """
        if self._skips:
            raise RuntimeError(
                "the last step was skipped, so there are no gradients to look at; see StepResult.problem"
            )
        for name, gradient in self._engine.full_gradients():
            yield name, gradient / self._clipped

    def memory(self) -> dict[str, int]:
        """Bytes of model state on this rank.

        `parameters` (with fp32 masters), `gradients`, `optimizer` state, and `gathered_peak`, the most parameters that
        were gathered for use at one time.
        """
        held = [bucket.bytes() for unit in self._engine.units for bucket in unit.buckets]
        return {
            "parameters": sum(row["parameters"] for row in held),
            "gradients": sum(row["gradients"] for row in held),
            "optimizer": state_bytes(self.optimizer),
            "gathered_peak": self._engine.gatherer.peak,
        }

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        keep_last: int | None = None,
    ) -> Saving:
        """Save all that the next step depends on, and `extra` (JSON values, the first rank's). Every rank calls it.

        With `wait=False` training may go on at once; only the next update waits, until what it changes has been read.
        `keep_last` removes the checkpoints beside it that are older than so many valid ones. Raises SaveError on every
        rank when this save (with `wait`), or the one before, came to nothing; what was saved earlier is as it was.
        """
        kept = {"steps": self._steps, "skips": self._skips, "user": dict(extra or {})}
        saving = self._state.save(Path(folder), extra=kept, keep_last=keep_last)
        if wait:
            saving.wait()
        return saving

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Take up a checkpoint that any plan has saved, and return its `extra`. Every rank calls it.

        Of a Hugging Face folder it takes the parameters, each rank its own; training begins anew.

        Raises DamageError on every rank when it is torn or altered; only another load then makes this a model again.
        ValueError, with nothing changed, when it is of another model or optimizer.
        """
        return self._took_up(self._state.load(Path(folder)))

    def restore(self, root: str | Path) -> Restored | None:
        """Load the newest valid checkpoint of a folder of checkpoints; None when there is none. Every rank calls it.

        Raises DamageError when there are some and not one is valid.
        """
        restored = self._state.restore(Path(root))
        return restored and replace(restored, extra=self._took_up(restored.extra))

    def _took_up(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        self._steps, self._skips = int(kept["steps"]), int(kept["skips"])
        extra: Mapping[str, Any] = kept["user"]
        return extra

    def close(self) -> None:
        """Take the hooks off the model."""
        self._state.close()
        self._engine.close()
        self._draws.close()


def _first_disagreement(mesh: Mesh, called: Mapping[int, Sequence[Stamp]]) -> str:
    meetings = dict.fromkeys(stamp.axes for stamps in called.values() for stamp in stamps if not stamp.point_to_point)
    for axes, ranks in [(met, ranks) for met in meetings for ranks in mesh.groups(met)]:
        calls = {rank: [stamp for stamp in called[rank] if stamp.axes == axes] for rank in ranks}
        for number in range(max(len(stamps) for stamps in calls.values())):
            present = {rank: stamps[number] for rank, stamps in calls.items() if number < len(stamps)}
            missing = sorted(set(calls) - set(present))
            if (table := disagreement(present)) or missing:
                less = "" if not missing else f"\n  ranks {missing} called no more than {number} of them in this step"
                return f"the ranks called different collectives in this step:\n{table or ''}{less}"
    return "the ranks called different collectives before this step"
