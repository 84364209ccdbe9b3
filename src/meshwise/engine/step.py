"""Run one training step: forward and backward of this rank's micro-batches, one exchange of sums, and the update.

One exchange sums the figures: the sum of the loss, its count, the squared norm of the gradient, and digests of the
calls and the batch. From them every rank makes the same decision: to update or not, and by which factor. If the digests
differ, no rank updates."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.flight_recorder import RanksDisagree, StepPhase, ranks_text
from meshwise.comm.in_process.thread_and_trace_worlds import ThreadWorld
from meshwise.data_parallel.stage_engines import Engine
from meshwise.engine.microbatch_runner import BatchSharder, OnGradient, zeros
from meshwise.engine.noise_scale import NoiseMeter, NoiseScale
from meshwise.engine.staged_runner import MicrobatchRunner
from meshwise.engine.step_result import (
    NonFiniteError,
    StateBeforeUpdate,
    StepInputs,
    StepResult,
    StepTotals,
    UpdateRecipe,
    batch_digest,
    check_count,
    culprits,
    mismatch_text,
)
from meshwise.memory.activation_policy import ActivationPolicy
from meshwise.memory.chunked_update import ChunkedUpdate, UpdateChunk
from meshwise.memory.malloc_options import first_step_of
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import LossScale, likely_count
from meshwise.sync.diverging_replicas import Replicas
from meshwise.sync.parameter_servers import ParameterServers

Inspection: TypeAlias = Callable[[OnGradient], None]
"""Function that runs forward and backward again, and passes each gradient to the callback that it is given."""


@dataclass
class StepAttempt:
    """A step that has begun, and its outcome as soon as that is known.

    | started   start time, in seconds of `time.perf_counter`
    | scale     loss scale of its backwards; None without one
    | totals    sums over the global batch; None before they are exchanged
    | problem   why the parameters were not updated; None if they were
    | noise     the gradient noise of the step; None if it was not measured"""

    started: float
    scale: LossScale | None
    totals: StepTotals | None = None
    problem: str | None = None
    noise: NoiseScale | None = None

    def result(self) -> StepResult:
        """Return the result for the user, as soon as `totals` are known."""
        totals, skipped = self.totals, self.problem is not None
        assert totals is not None
        took = time.perf_counter() - self.started
        scale = 1.0 if self.scale is None else self.scale.value
        return StepResult(totals.mean, totals.norm, int(totals.count), took, skipped, self.problem, scale, self.noise)


class StepAfterBackward:
    """Update of all parameters after the backward, when loss and norm are known."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate) -> None:
        self._engine = engine
        self._update = update

    def begin(self) -> None:
        """Prepare the buckets for this step's gradients. Raises TierError if an earlier update failed half way."""
        self._update.check()
        self._update.cut(self._engine.follow_requires_grad())
        local = bool(getattr(self._update.optimizer, "keeps_gradients", False))
        for bucket in self._engine.buckets:
            bucket.local = local
            if not local:
                bucket.reduction_state.pop("momentum", None)  # stale after this step, which updates slices alone

    def apply(self, factor: float) -> None:
        """Multiply the gradients by `factor` and update all buckets; publish each bucket as soon as it is updated."""
        self._engine.wait_updated()  # units that no forward has used since the last update
        self._engine.scale_gradients(factor)
        # A worker of parameter servers updates no chunk, but it takes part in the collectives of `publish`.
        works = {bucket: bucket.publish() for bucket in self._engine.buckets if not bucket.chunks}
        last = {bucket.chunks[-1]: bucket for bucket in self._engine.buckets if bucket.chunks}

        def done(chunk: UpdateChunk) -> None:
            if chunk in last:
                works[last[chunk]] = last[chunk].publish()

        self._update.step(done)
        for unit in self._engine.units:
            unit.receive_update([works[bucket] for bucket in unit.buckets if bucket in works])


class TrainingSteps:
    """The steps of one training, and the state between them."""

    def __init__(
        self,
        engine: Engine,
        *,
        runner: MicrobatchRunner,
        plan: Plan,
        recipe: UpdateRecipe,
        updating: StepAfterBackward | ParameterServers,
        policy: ActivationPolicy,
        replicas: Replicas | None = None,
    ) -> None:
        """`policy`: which activations are recomputed or moved to a tier. `updating`: the update, here or on servers.

        `replicas`: under a `sync` across steps; each replica then decides about its own updates."""
        self.applied = True
        """True if the last step updated the parameters: it neither was skipped nor raised."""
        self.clipped = 1.0
        """Factor at most 1 by which clipping multiplied the gradient of the last update; 1 without clipping."""
        self.sharder = BatchSharder(engine.world, plan.row_axes, runner.runs_empty, plan.server)
        self._world = engine.world
        self.engine = engine
        self._runner = runner
        self._plan = plan
        self._recipe = recipe
        self._updating = updating
        self._policy = policy
        self._replicas = replicas if plan.apart_axes else None
        self._together = engine.world.mesh.others(plan.apart_axes)
        self._ranks = ranks_text(engine.world.group(self._together).ranks) if plan.apart_axes else "every rank"
        self._steps = self._skips = 0
        self._compared = False
        self._scale = recipe.scale
        self._before = StateBeforeUpdate(engine.modules)
        self._noise = NoiseMeter(engine, plan=plan) if recipe.noise else None
        # Ranks that are threads share their process with other code, so its allocator is left as it is.
        self._takes_shape = not isinstance(self._world, ThreadWorld)

    def step(self, batch: Any, *, local: bool, total: int | None, only: Collection[int] | None) -> StepResult:
        """Run one step; arguments, result and errors as in `Trainer.step`."""
        servers = self._updating
        if not isinstance(servers, ParameterServers):
            return self._step(batch, local=local, total=total, only=only)
        if servers.serving:
            return self._serve(servers)
        with servers.step():
            return self._step(batch, local=local, total=total, only=only)

    def _serve(self, servers: ParameterServers) -> StepResult:
        """Run a step of a server; return the workers' mean loss, and the root mean square of their gradients' norms."""
        began, self.applied = time.perf_counter(), True
        servers.serve()
        loss, count, squared = servers.sums
        norm = math.sqrt(squared / max(servers.received, 1))
        return StepResult(loss / max(count, 1), norm, int(count), time.perf_counter() - began)

    def _step(self, batch: Any, *, local: bool, total: int | None, only: Collection[int] | None) -> StepResult:
        if self._replicas is not None:
            self._replicas.join()
        micro_batches = self.sharder.split(batch, local=local, total=total, count=self._plan.microbatches)
        rows = tree.row_count(batch) * (self.sharder.ranks if local else 1) if total is None else total
        if self._plan.apart_axes and rows < self.sharder.ranks:
            raise ValueError(
                f"the batch has {rows} rows for {self.sharder.ranks} replicas of '{self._plan}', which each need a row "
                "for their update; leave short batches out, as in DataLoader(…, drop_last=True)"
            )
        if only is not None:
            for index in set(range(len(micro_batches))).difference(only):
                micro_batches[index] = replace(micro_batches[index], rows=None, counts=False)
        with self.attempt() as attempt:
            self._estimate_count(batch, local=local)
            given = batch_digest(batch, contents=not self._compared)
            with self._world.record() as called:
                self._recipe.routers.scale = self.factor
                sums = self._runner.train(micro_batches, scale=self.factor)
                sums[0].add_(self._recipe.routers.loss)
                self._recipe.routers.active = False
                self._runner.finish()
                self._world.flight_recorder.doing = StepPhase.EXCHANGE
                inputs = StepInputs(given, tree.row_count(batch), tuple(called))
                more = [self.engine.squared_norm(), *(() if self._noise is None else self._noise.squares())]
                loss, count, *squares = self.totals(sums, inputs=inputs, local=local, more=more, axes=self._together)
            check_count(count)
            self._compared = True
            squared, *noise = (one / self.factor**2 for one in squares)
            if isinstance(self._updating, ParameterServers):
                self._updating.sums = [loss, count, squared / max(count, 1) ** 2]
            self.decide(
                attempt,
                totals=StepTotals(loss, count, squared, self._ranks),
                inspect=lambda arrival: self._runner.inspect(micro_batches, on_gradient=arrival),
            )
            if self._noise is not None and attempt.problem is None:
                attempt.noise = self._noise.scale(noise, count=count, rows=rows)
        if self._replicas is not None:
            self._replicas.after_step(count if attempt.problem is None else 0.0)
        return attempt.result()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[StepAttempt]:
        """Begin a step; after the block, undo the forwards' changes of state unless `decide` updated the parameters."""
        attempt = StepAttempt(time.perf_counter(), self._scale)
        began = time.monotonic()
        self._world.flight_recorder.doing = StepPhase.BEGIN
        self.engine.check_parameters()
        self._updating.begin()
        self._runner.begin(self._steps)
        self._before.keep()
        if self._noise is not None:
            self._noise.begin()
        self._recipe.routers.begin()
        self.applied = False
        with first_step_of(self._world) if self._takes_shape else contextlib.nullcontext():
            try:
                yield attempt
            finally:
                self._recipe.routers.active = False
                if not self.applied:
                    self._before.put_back()
            if self._policy.blocks.steps_to_measure:
                self._policy.blocks.finish()
        self._takes_shape &= not self.applied  # the first update makes the optimizer's state
        self._world.flight_recorder.doing = StepPhase.OUTSIDE
        moved = (piece for piece in self.engine.tiers.moved if piece.started >= began)
        self._world.flight_recorder.add_background((piece.kind, piece.started, piece.ended) for piece in moved)

    def decide(self, attempt: StepAttempt, *, totals: StepTotals, inspect: Inspection | None = None) -> None:
        """Update the parameters if the sums allow it, and note the outcome in `attempt`.

        inspect: runs forward and backward again, for a message that names the gradients that are not finite. Raises
        NonFiniteError when the policy does not allow the step to be skipped."""
        self._world.flight_recorder.doing = StepPhase.UPDATE
        attempt.totals = totals
        if totals.problem is not None:
            self._before.put_back()
            attempt.problem = self._left_out(totals.problem, totals, inspect)
            return
        totals.warn_if_gradient_is_zero(self._world.rank)
        clip = self._recipe.clip_norm
        self.clipped = 1.0 if clip is None else min(1.0, clip / (totals.norm + 1e-6))
        factor = self.clipped / totals.count / self.factor
        if self._scale is not None:
            self._scale = self._scale.updated().expecting(totals.count)
        self._updating.apply(factor)
        self._recipe.routers.update(self._world)
        self.applied = True
        self._skips, self._steps = 0, self._steps + 1

    def _left_out(self, problem: str, totals: StepTotals, inspect: Inspection | None) -> str:
        """Count a skipped step, and return the reason. Raises NonFiniteError when the policy allows no more skips."""
        scale = self._scale
        if scale is not None and totals.overflowed and not scale.exhausted:
            self._scale = scale.overflowed().expecting(totals.count)
            return f"the gradient overflowed at a loss scale of {scale.value:g}; it is {self._scale.value:g} now"
        if totals.count and inspect is not None:
            problem += culprits(self.engine, axes=self._together, run=inspect)
        self._skips += 1
        if self._skips > self._recipe.nonfinite.most:
            raise NonFiniteError(problem + self._recipe.nonfinite.advice(counted=bool(totals.count)))
        return problem

    @property
    def factor(self) -> float:
        """Factor that multiplies the loss before the backward."""
        return 1.0 if self._scale is None else self._scale.factor

    def expect_mean(self) -> None:
        """Choose the loss scale for backwards of a loss that is divided by its count already."""
        if self._scale is not None:
            self._scale = self._scale.expecting(1.0)

    def _estimate_count(self, batch: Any, *, local: bool) -> None:
        """Estimate the count of a batch for the loss scale, as long as no step has measured it."""
        if self._scale is not None and not self._scale.count:
            shards = self.sharder.ranks if local else 1
            self._scale = self._scale.expecting(shards * max(self._world.exchange(likely_count(batch))))

    # ---- sums over the ranks -----------------------------------------------------------------------------------

    def totals(
        self,
        sums: tuple[Tensor, Tensor],
        *,
        inputs: StepInputs,
        local: bool,
        more: Sequence[Tensor] = (),
        axes: Sequence[str] | None = None,
    ) -> list[float]:
        """Sum loss and count (`sums`) and `more` over the ranks along `axes` (None: all ranks); return the sums.

        Raises RanksDisagree if batches or collectives differ; with `local`, only ranks that share rows need equal
        batches. If ranks compute the same loss, the first one's is added; in a pipeline only the last stage has one."""
        world = self._world
        counts = world.group(world.mesh.others(("pp", *self._plan.loss_axes))).index == 0
        own = [*(sums if counts else zeros(world)), *more]
        axes = world.mesh.names if axes is None else axes
        rows = world.mesh.expand(self._plan.row_axes) if local else ()
        equal = [axis for axis in axes if axis not in rows]
        return self.summed(torch.stack(own), inputs=inputs, equal=equal, axes=axes)

    def summed(self, values: Tensor, *, inputs: StepInputs, equal: Sequence[str], axes: Sequence[str]) -> list[float]:
        """Sum `values`, an fp64 vector, over the ranks along `axes`, and return the sums.

        Raises RanksDisagree if the digests of `inputs` differ along `equal`, or if frozen parameters or collectives
        differ along `axes`."""
        world, frozen = self._world, self.engine.frozen_digest
        found, mismatch = world.totals(values, digest=inputs.batch, digest_axes=equal, axes=axes, common=frozen)
        if mismatch:
            inputs = replace(inputs, frozen=self.engine.frozen() if any(world.exchange(frozen, axes=axes)) else None)
            found_inputs = dict(world.exchange((world.rank, inputs), axes=axes))
            if text := mismatch_text(world.mesh, found=found_inputs, equal=equal):
                raise RanksDisagree(text)
        self.engine.frozen_digest = 0
        return found

    def close(self) -> None:
        """Remove the hooks that measure noise."""
        if self._noise is not None:
            self._noise.close()

    # ---- from one run to the next ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a resumed run: `steps` (updates so far), `skips` (in a row), `scale` (or None).

        `replicas` has the state of each replica under a `sync` across steps (a collective)."""
        own = {"steps": self._steps, "skips": self._skips, "scale": self._scale and asdict(self._scale)}
        return {**own, "replicas": self._world.exchange(own, axes=self._plan.sync_axes)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        of_each, group = saved.get("replicas", ()), self._world.group(self._plan.sync_axes)
        saved = of_each[group.index] if len(of_each) == group.size else saved
        self._steps, self._skips = int(saved["steps"]), int(saved["skips"])
        if self._scale is not None and saved.get("scale") is not None:
            self._scale = LossScale(**saved["scale"])
