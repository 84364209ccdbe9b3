"""The Trainer, a user's handle on a model under a plan: train steps, evaluate, predict, inspect tensors, save, load.

`profile` writes a profile of its steps. `measure` records when each action begins and ends (docs/pipeline.md)."""

import contextlib
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshwise.base.tensor_tree import map_tensors, row_count
from meshwise.checkpoint.checkpoint_folder import on_all_ranks
from meshwise.checkpoint.save_state import PendingSave
from meshwise.checkpoint.training_state import RestoredState, TrainingState
from meshwise.comm.api.flight_recorder import ActivityStopwatch
from meshwise.comm.api.world import World
from meshwise.data_parallel.checkpoint_slices import buffers
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.data_parallel.stage_engines import Engine
from meshwise.engine.microbatch_runner import BatchSharder, WholeModelRunner, gather_rows, zeros
from meshwise.engine.open_step import OpenStep
from meshwise.engine.parameter_average import AVERAGE, ParameterAverage
from meshwise.engine.staged_runner import MicrobatchRunner
from meshwise.engine.step import StepAfterBackward, TrainingSteps
from meshwise.engine.step_result import EvalResult, StepInputs, StepResult, UpdateRecipe, batch_digest, check_count
from meshwise.expert.expert_parallel import fullest_mixture, imbalances, take_counts
from meshwise.expert.router_losses import SHARES
from meshwise.memory.activation_offload import ActivationTier
from meshwise.memory.activation_policy import ActivationPolicy, RecomputedBlocks
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.memory.malloc_options import memory_errors_explained
from meshwise.memory.tiers import Tiers
from meshwise.model.compiled_blocks import CompiledBlocks
from meshwise.model.forward import eval_mode
from meshwise.model.module_copy import PartialCopyGuard
from meshwise.model.parameter_table import ParameterTable
from meshwise.optim.build_optimizer import state_tensors
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.run.measured_step import MeasuredStep, measured_steps
from meshwise.pipeline.schedules.schedule_table import Schedule
from meshwise.plan import Plan, PlanError
from meshwise.precision.dtype_policy import KINDS, dtype_names
from meshwise.sync.diverging_replicas import Replicas
from meshwise.sync.parameter_servers import ParameterServers, ServedGradient
from meshwise.sync.sync_scheme import SyncScheme


class Trainer:
    """Handle on a model under a plan: trains, evaluates, predicts, saves and loads. `parallelize` returns it."""

    def __init__(
        self,
        engine: Engine,
        *,
        runner: MicrobatchRunner,
        plan: Plan,
        recipe: UpdateRecipe,
        optimizer: torch.optim.Optimizer,
        policy: ActivationPolicy,
        scheme: SyncScheme | None = None,
    ) -> None:
        """`optimizer`: over the slices that this rank updates. `policy`: activations to recompute or to move.

        `scheme`: how replicas agree across steps; None under `sync=step`."""
        self.plan = plan
        self.optimizer = optimizer
        self.scheme = scheme
        self._engine = engine
        self._runner = runner
        split = any(row.layout.axes or row.held_at for row in engine.table.rows)
        split = split or any(unit.is_sharded or unit.overlaps for unit in engine.units)
        self._copies = PartialCopyGuard(engine.modules if split else (), plan=str(plan))
        self._recipe = recipe
        self._policy = policy
        chunks = (chunk for bucket in engine.buckets for chunk in bucket.chunks)
        self._update = ChunkedUpdate(optimizer, chunks=chunks, tiers=engine.tiers)
        self._average: ParameterAverage | None = None
        self._state = TrainingState(engine, update=self._update, plan=plan)
        wait = self._state.wait_staged
        self.agreements: Replicas | None = None
        """Rounds of the replicas under a `sync` across steps; None under `sync=step`."""
        if scheme is not None:
            self.agreements = Replicas(engine, optimizer=optimizer, scheme=scheme, axes=plan.sync_axes, wait=wait)
        self._servers = None
        if plan.asynchronous:
            self._servers = ParameterServers(engine, update=self._update, optimizer=optimizer, plan=plan, wait=wait)
        self._state.replicas, self._state.servers = self.agreements, self._servers
        timing = self._servers or StepAfterBackward(engine, update=self._update)
        self._stepping = TrainingSteps(
            engine, runner=runner, plan=plan, recipe=recipe, updating=timing, policy=policy, replicas=self.agreements
        )

    @property
    def model(self) -> nn.Module:
        """The user's module; under zero=3 its parameters are gathered only while it runs.

        Under `overlap_gather=1` trained parameters are NaN after a step, until a forward or a call such as `evaluate`.
        With pp, the stage of this rank: a module of the same class. A ModuleList if the rank has several stages."""
        return self._engine.module

    @property
    def modules(self) -> Sequence[nn.Module]:
        """A list of the model alone; with pp, of the stages that this rank has."""
        return self._engine.modules

    @property
    def units(self) -> Sequence[LiveUnit]:
        """Units of this rank: groups of parameters, usually one block each, gathered and reduced together."""
        return self._engine.units

    @property
    def blocks(self) -> RecomputedBlocks:
        """Blocks that are recomputed in the backward, and the measured costs from which a budget chose them."""
        return self._policy.blocks

    @property
    def compiled(self) -> CompiledBlocks:
        """Numbers of compiled graphs, graph breaks and recompilations on this rank under `compile=blocks`."""
        return self._policy.compiled

    @property
    def tiers(self) -> Tiers:
        """Memories (device, CPU, disk) that hold parameters and optimizer state between their uses."""
        return self._engine.tiers

    @property
    def activations(self) -> ActivationTier | None:
        """Tier that holds the activations saved for the backward; None if they stay on the device."""
        return self._policy.activations

    @property
    def precision(self) -> Mapping[str, str]:
        """Names of the dtypes of this rank's tensors, by kind; several dtypes of a kind are separated by spaces.

        The kinds are `parameters`, `compute`, `reduction`, `accumulation`, `master`, `optimizer_state` and `buffers`.
        Before the first step makes gradients and optimizer state, their dtypes are those that it will make."""
        buckets = [bucket for unit in self._engine.units for bucket in unit.buckets]
        found = {kind: {one[kind] for one in (bucket.dtypes() for bucket in buckets) if kind in one} for kind in KINDS}
        found["compute"] = {self._recipe.precision.compute_dtype or dtype for dtype in found["parameters"]}
        found["buffers"] = {buffer.dtype for module in self.modules for buffer in module.buffers()}
        if made := {value.dtype for value in state_tensors(self.optimizer) if value.dim()}:
            found["optimizer_state"] = made
        return dtype_names(found)

    @property
    def table(self) -> ParameterTable:
        """Parameter table: one row per logical parameter."""
        return self._engine.table

    @property
    def world(self) -> World:
        """Connection of the ranks: the mesh and its collectives."""
        return self._engine.world

    @property
    def schedule(self) -> Schedule:
        """Schedule: the actions of each rank along `pp` in a step, in order."""
        return self._runner.schedule

    @property
    def cut(self) -> ModelCut | None:
        """Division of the model into pipeline stages; prints as a table of their modules and loads. None without pp."""
        return self._runner.cut

    # ---- training ----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Number of parts into which the plan splits the rows of a batch: `num_replicas` of a DistributedSampler."""
        return self._stepping.sharder.ranks

    @property
    def replica(self) -> int:
        """Index of this rank's part of the rows: `rank` of a DistributedSampler. Ranks of a tp group have one part."""
        return min(self.world.group(self.plan.row_axes).index, self.replicas - 1)  # servers use no rows

    def share(self, size: int) -> tuple[int, int]:
        """Return [start, stop): the rows of a global batch of `size` rows that this rank takes."""
        shards = self._stepping.sharder.shards(size)
        return shards.shares[shards.index]

    def set_shares(self, weights: Sequence[int] | None) -> None:
        """Split each batch into parts of sizes proportional to `weights`, from the next `share` and step on.

        weights: a positive whole number for each of the `replicas`, equal on every rank, else ValueError; None: even
        shares. The shares change results only by rounding. Raises PlanError if the plan lets replicas differ."""
        if self.plan.apart_axes or self.plan.sync_axes:
            raise PlanError(f"'{self.plan}' lets replicas differ, so shares change the result; leave out train.shares")
        if weights is not None and (len(weights) != self.replicas or min(weights) < 1):
            raise ValueError(f"weights {list(weights)} are not {self.replicas} numbers above 0, one for each replica")
        self._stepping.sharder = replace(self._stepping.sharder, weights=None if weights is None else tuple(weights))

    def step(
        self, batch: Any, *, local: bool = False, total: int | None = None, only: Collection[int] | None = None
    ) -> StepResult:
        """Train one optimizer step on a batch, a tree of tensors whose dim 0 counts the samples; return its result.

        | batch   the global batch, equal on every rank; each rank takes the rows of `share`. They may divide unevenly
        | local   True: `batch` has only this rank's rows, which may be none: the rows of part `replica` of `replicas`
        | total   with `local`, rows of the global batch, split as `share` returns; None: every rank has as many rows as
        |         this one. Dropout depends on a row's number in the global batch
        | only    numbers of the micro-batches to run, None for all; a rehearsal runs one of several equal ones

        Raises NonFiniteError when the loss or the gradient is not finite and `Options.nonfinite` allows no skip. Raises
        RanksDisagree when the ranks called different collectives, or ranks that need equal batches were given different
        ones. Batches are compared by shape, and until a step succeeds also by content; local batches only among ranks
        that share their rows. Raises LossError when `loss` does not return (sum, count), and any error of the model.

        A step that raised has no effect: parameters, optimizer, running statistics and the next draws are as before.
        Only with a codec, compression errors that it has sent are lost, as in a skipped step. After all ranks have
        caught the error, they may continue, with three exceptions. After an error of the optimizer itself, steps raise
        TierError until a checkpoint is loaded. After an error in a stage of pp, messages may still be under way, so the
        next step raises StageError. Under `server` without `staleness`, servers wait for the workers' gradients and
        raise RanksDisagree, so the training ends."""
        self._refuse_averaged()
        with self._memory_errors_explained():
            return self._stepping.step(batch, local=local, total=total, only=only)

    def join(self) -> int:
        """Join other jobs (`Options.sync` with `join`), unless this job has; return the steps by which that moved it.

        Every rank calls it; `step` does too. Joining waits for a round of the other jobs, and copies the state of one
        of them, which may be some steps ahead, or behind (a negative result). The result counts from the last call."""
        if self.agreements is None:
            return 0
        self.agreements.join()
        moved, self.agreements.moved = self.agreements.moved, 0
        return moved

    def _memory_errors_explained(self) -> contextlib.AbstractContextManager[None]:
        return memory_errors_explained(self.plan, memory=self.memory, hint=lambda: fullest_mixture(self.modules))

    def open_step(self) -> OpenStep:
        """Return a step whose forwards, losses and backwards the caller runs: `with trainer.open_step() as step:`.

        Raises PlanError with pp."""
        self._refuse_averaged()
        if self._recipe.routers.losses:
            raise PlanError("router_losses are added by trainer.step; leave them out, and add losses in the open step")
        if self.plan.apart_axes or self.plan.sync_axes:
            raise PlanError(f"open_step sums gradients over replicas, and '{self.plan}' does not; use sync=step")
        return OpenStep(self._stepping, runner=self.whole_runner("open_step"), plan=self.plan)

    def whole_runner(self, what: str) -> WholeModelRunner:
        """Return the runner of a plan without pp. Raises PlanError with pp; `what`: the caller, for the message."""
        if isinstance(self._runner, WholeModelRunner):
            return self._runner
        raise PlanError(
            f"{what} runs forward and backward when the script says so, and pp={self.plan.pp} runs them by a schedule; "
            "use trainer.step with a loss function, or a plan without pp"
        )

    def average(self, decay: float) -> ParameterAverage:
        """Keep an exponential moving average of the parameters from now on, and return it. A trainer keeps one.

        `with average.applied():` evaluates, predicts or exports with the averaged parameters. `save` and `load` include
        the average: call this before the steps that follow a `load`. Without a loaded one, it begins with the present
        parameters. Raises PlanError if the optimizer's state is offloaded, ValueError for a decay outside (0, 1)."""
        if self.plan.tiers.state_tiers != {"device"}:
            raise PlanError(f"offload={self.plan.offload} excludes an average, kept on the device; use offload=none")
        if self._average is not None:
            self._average.close()
        publish = self._engine.publish if self._servers is None else self._servers.pull
        given: dict[str, Any] = {"wait": self._state.wait_staged, "publish": publish}
        self._average = ParameterAverage(self._engine, optimizer=self.optimizer, decay=decay, **given)
        return self._average

    def _refuse_averaged(self) -> None:
        if self._average is not None and self._average.swapped:
            raise RuntimeError("the model has its averaged parameters; leave the block of average.applied() first")

    def gather(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the rows of `x` of all ranks, with gradients, and the index of this rank's first row among them.

        For a loss that compares the samples of a batch (in-batch negatives). A loss of `parallelize` may call it, on
        every rank: `rows, first = trainer.gather(features)`. The rows of one micro-batch are returned, in the order
        of the global batch. The backward sums the gradients of all ranks. Each rank needs at least one row."""
        return gather_rows(x, world=self.world, axes=self.plan.row_axes, counts=self._runner.counts)

    def evaluate(self, batches: Iterable[Any], *, local: bool = False) -> EvalResult:
        """Return the loss over `batches` without training, with the model in eval mode. `local` is as in `step`.

        Every rank passes the same number of batches. Replicas that differ use their mean. Raises LossError for counts
        that are negative or not finite, and RanksDisagree as `step` does."""
        total, tokens = zeros(self.world)
        splits, digest, rows = self._runner.evaluation_micro_batches, 0, 0
        with torch.no_grad(), eval_mode(self.model), self._mean_of_replicas():
            for number, batch in enumerate(batches):
                digest, rows = batch_digest(batch, contents=number == 0, before=digest), rows + row_count(batch)
                self._runner.begin(-1 - number)  # numbers that no step has: random draws depend on them
                micro_batches = self._stepping.sharder.split(batch, local=local, total=None, count=splits)
                with self._memory_errors_explained():
                    loss, count = self._runner.evaluate(micro_batches)
                total += loss
                tokens += count
        inputs = StepInputs(digest, rows, ())  # calls of a long evaluation are not kept
        loss_sum, count_sum = self._stepping.totals((total, tokens), inputs=inputs, local=local)
        check_count(count_sum)
        return EvalResult(loss_sum / count_sum if count_sum else math.nan, int(count_sum))

    def expert_imbalances(self) -> Mapping[str, float]:
        """Return the tokens of the busiest expert over the mean of all experts, by mixture.

        Every rank calls it. The tokens are of all steps since the last call, as the routers chose. Experts that are
        modules are counted where the plan divides them."""
        return imbalances(self._engine.modules, counted=self._recipe.routers.loads, world=self.world)

    def expert_drops(self) -> Mapping[str, Sequence[int]]:
        """Return the dropped and all pairs of a token and an expert, by mixture; {} without `expert_capacity`.

        Every rank calls it. The pairs are of all steps since the last call, over all ranks."""
        copies = self.world.mesh.others(("pp", *self.plan.loss_axes))
        return take_counts(self._recipe.routers.drops, world=self.world, copies=copies)

    def predict(self, batch: Any, *, split: bool = False) -> Any:
        """Return the output of the model for `batch`, without gradients and in eval mode. Every rank calls it.

        Without `split`, each rank computes all rows of its own `batch`. With `split`, `batch` is a global batch: each
        rank computes a part, and gets the output of all rows, in order and each once. The output holds full tensors,
        which one rank alone may read. A scalar that differs between the parts, as their mean loss, is NaN. With pp,
        raises PlanError for an output tensor that the last stage lacks."""
        with torch.no_grad(), eval_mode(self.model), self._mean_of_replicas() if split else contextlib.nullcontext():
            if not split:
                return self._runner.predict(batch)
            axes = self.plan.row_axes
            sharder = BatchSharder(self.world, axes, runs_empty=True, servers=self.plan.server)
            [part] = sharder.split(batch, local=False, total=None, count=1)

            def gathered(x: Tensor) -> Tensor:
                rows, _ = gather_rows(torch.atleast_1d(x), world=self.world, axes=axes, counts=part.counts)
                first = next(iter(rows), x)
                return rows if x.dim() else first if rows.eq(first).all() else first * math.nan

            return map_tensors(gathered, self._runner.predict(part.rows))

    # ---- full tensors ------------------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of every parameter, in table order. Every rank must iterate to the end.

        A tensor is valid until the next one is yielded: copy it to keep it. Under a `sync` across steps it is the mean
        of the replicas; `trainer.model` has the parameters of this rank's replica."""
        with self._mean_of_replicas():
            yield from self._engine.full_parameters()

    def update_log(self) -> list[list[ServedGradient]]:
        """Return each server's log of applied gradients, on every rank; empty without `staleness`. Every rank calls it.

        A gradient is (worker, its step, version that it read, version that it made)."""
        return [] if self._servers is None else list(self._servers.state()["logs"])

    def _mean_of_replicas(self) -> contextlib.AbstractContextManager[None]:
        if self._servers is not None:
            self._servers.pull()
        return contextlib.nullcontext() if self.agreements is None else self.agreements.averaged()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full gradient) of the last step's mean loss, before clipping. Every rank iterates to the end.

        Raises RuntimeError when the last step was skipped or raised: its gradients are not finite or incomplete."""
        if self._servers is not None:
            raise RuntimeError(f"under staleness={self.plan.staleness} each worker pushes a gradient of its own rows")
        if not self._stepping.applied:
            raise RuntimeError(
                "the last step was skipped or raised an exception, so it has no gradients to show; see "
                "StepResult.problem"
            )
        for name, gradient in self._engine.full_gradients():
            yield name, gradient / self._stepping.clipped

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of every buffer of all stages. Every rank must iterate to the end."""
        return self._engine.full_buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full parameters and persistent buffers by name, as CPU tensors on rank 0; {} on other ranks.

        Every rank calls it. Names and values are as in `model.state_dict()` on one process; tied names share one."""
        found: dict[str, Tensor] = {}
        persistent = set().union(*self.world.exchange({held.name for held in buffers(self.modules)}))
        aliases = {row.name: row.aliases for row in self.table.rows}
        for name, value in itertools.chain(self.full_parameters(), self.full_buffers()):
            if self.world.rank == 0 and (name in aliases or name in persistent):
                found |= dict.fromkeys((name, *aliases.get(name, ())), value.detach().to("cpu", copy=True))
        return found

    def save_pretrained(self, folder: str | Path, **arguments: Any) -> None:
        """Write a model of transformers or PEFT to `folder`, as its own `save_pretrained` does. Every rank calls it.

        `arguments` go to the model's method; rank 0 alone writes. Raises ValueError for a model without that method,
        and, on every rank, if rank 0 cannot write."""
        model = self.modules[0]
        write = getattr(model, "save_pretrained", None)
        if write is None:
            raise ValueError(
                f"{type(model).__name__} has no save_pretrained, which models of transformers and PEFT have. On every "
                'rank: state = trainer.state_dict(); then on rank 0: torch.save(state, "model.pt")'
            )
        state = {name: value for name, value in self.state_dict().items() if not name.endswith(f".{SHARES}")}

        def written() -> None:
            try:
                if state:
                    self._copies.reading_names()(write)(folder, state_dict=state, **arguments)
            except OSError as error:
                raise ValueError(f"{folder} was not written: {error}") from error

        on_all_ranks(written, world=self.world)

    def memory(self) -> dict[str, int]:
        """Return the bytes of model state on this rank, by kind.

        | parameters, gradients      with the fp32 masters
        | optimizer, reduction       state of the optimizer, and of the gradients' reduction
        | gathered_peak              most bytes of parameters that were gathered at one time
        | disk/optimizer, …          state on another tier; for activations on another tier, their peak
        | staging                    buffers on the way to another tier"""
        tiers = self._engine.tiers
        states = [("optimizer", tensor) for tensor in state_tensors(self.optimizer)]
        staging = {"staging": tiers.staged} if tiers.staged else {}
        return {**self._engine.memory(), "optimizer": 0, **tiers.bytes(states), **staging, **self._policy.memory()}

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        keep_last: int | None = None,
    ) -> PendingSave:
        """Save a checkpoint to `folder`: all state that the next step depends on. Every rank calls it.

        | extra       JSON values of the user, saved as the first rank gives them
        | wait        False: return at once. Training may continue; the next update waits for the copies that it needs
        | keep_last   number of valid checkpoints beside `folder` to keep; the save removes older ones. None: keep all.
        |             Only names that end with a number count, as step-100: `best` and `last` are never removed

        Raises SaveError on every rank if this save (with `wait`) or the one before failed, and keeps earlier ones."""
        self._refuse_averaged()
        if self._average is None:
            for state in self.optimizer.state.values():
                state.pop(AVERAGE, None)  # loaded from a checkpoint, and not updated since
        kept = {**self._stepping.state(), "user": dict(extra or {})}
        saving = self._state.save(Path(folder), extra=kept, keep_last=keep_last)
        if wait:
            saving.wait()
        return saving

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Load a checkpoint, saved under any plan, and return its `extra`. Every rank calls it.

        From a Hugging Face folder, each rank loads its parameters, and training then begins at step 0. The result has
        one key, `unused`: the names of the tensors in the folder that the model does not have.

        Raises DamageError on every rank when the checkpoint is incomplete or altered; load another checkpoint before
        you continue. Raises ValueError, and changes nothing, for a checkpoint of another model or optimizer."""
        self._refuse_averaged()
        return self._resumed(self._state.load(Path(folder)))

    def restore(self, root: str | Path) -> RestoredState | None:
        """Load the newest valid checkpoint in the folder `root` of checkpoints. Every rank calls it.

        Return its path, its `extra` and the damaged checkpoints that were skipped; None when there is no checkpoint.
        Raises DamageError when there are checkpoints and none is valid."""
        self._refuse_averaged()
        restored = self._state.restore(Path(root))
        return restored and replace(restored, extra=self._resumed(restored.extra))

    def _resumed(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stepping.load_state(kept)
        if self.agreements is not None:
            self.agreements.load_state(kept)
        if self._servers is not None:
            self._servers.load_state(kept.get("servers"))
        return dict(kept["user"])

    def close(self) -> None:
        """Wait for parameters, remove the hooks, close the tiers' files; a save under way continues."""
        self._stepping.close()
        if self.agreements is not None and self.agreements.jobs is not None:
            self.agreements.jobs.close()
        self._state.close()
        self._runner.close()
        self._engine.tiers.close()
        self._policy.close()
        self._engine.close()  # last, because after a lost rank it raises


class StepMeasurement:
    """Measurement of the steps that a trainer ran in the block of `measure`."""

    def __init__(self, trainer: Trainer, *, watch: ActivityStopwatch) -> None:
        """`watch`: stopwatch that recorded this rank's activities."""
        self._trainer, self._watch = trainer, watch

    def steps(self) -> list[MeasuredStep]:
        """Return the measured steps, each with the actions of all ranks. Every rank calls it, after the block."""
        return measured_steps(self._watch, world=self._trainer.world, schedule=self._trainer.schedule)

    def typical(self) -> MeasuredStep | None:
        """Return the step with the median time, or None without steps. Every rank calls it, after the block."""
        steps = sorted(self.steps(), key=lambda one: one.step.seconds)
        return steps[len(steps) // 2] if steps else None


@contextlib.contextmanager
def measure(trainer: Trainer) -> Iterator[StepMeasurement]:
    """Record when each action of this rank begins and ends, in the steps inside the block. Every rank enters it.

    A record reads the clock, or on a GPU adds an event to the stream without waiting; a step has dozens of records."""
    with trainer.world.timed() as watch:
        yield StepMeasurement(trainer, watch=watch)


@contextlib.contextmanager
def profile(trainer: Trainer, *, into: Path) -> Iterator[None]:
    """Write a Chrome trace of torch's profiler for the steps inside the block, to `into/rank-N.json` on each rank.

    Operations and kernels lie below ranges for the actions of the schedule (`0F3`) and the forwards of units (`unit
    blocks.0`). Ranges of collectives show their start (`start all_gather dp`) and waits for them (`wait …`).
    Profile one step after some others: the first steps allocate memory. In a process that Nsight Systems has started
    (`nsys profile …`), the ranges are NVTX ranges of its report, and no file is written."""
    with trainer.world.flight_recorder.profiled(), _unit_ranges(trainer):
        if trainer.world.device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            with torch.autograd.profiler.emit_nvtx():
                yield
            return
        into.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as trace:
            yield
            trainer.world.streams.synchronize()
    trace.export_chrome_trace(str(into / f"rank-{trainer.world.rank}.json"))


@contextlib.contextmanager
def _unit_ranges(trainer: Trainer) -> Iterator[None]:
    """Show the forwards of the modules of units inside the block to torch's profiler, as ranges."""
    running: list[Any] = []
    names = {name for unit in trainer.units for name in unit.spec.modules}

    def begin(name: str, *_: Any) -> None:
        running.append(record_function(f"unit {name or 'the model'}").__enter__())

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as undo:
        for name, module in (each for stage in trainer.modules for each in stage.named_modules() if each[0] in names):
            undo.callback(module.register_forward_pre_hook(partial(begin, name)).remove)
            undo.callback(module.register_forward_hook(end, always_call=True).remove)
        yield
