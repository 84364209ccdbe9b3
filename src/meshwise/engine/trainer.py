"""The Trainer: a model under a plan, and what a user does with it.

It trains steps (`step.py`), evaluates and predicts, shows what a rank has and the full tensors, saves and loads.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.checkpoint.save_state import PendingSave
from meshwise.checkpoint.training_state import RestoredState, TrainingState
from meshwise.comm.api.world import World
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.data_parallel.update_timing import build_update
from meshwise.engine.microbatch_runner import MicrobatchRunner, zeros
from meshwise.engine.step import TrainingSteps
from meshwise.engine.step_result import EvalResult, StepResult, UpdateRecipe, check_count
from meshwise.memory.activation_offload import ActivationTier
from meshwise.memory.activation_policy import ActivationPolicy, RecomputedBlocks
from meshwise.memory.memory_error import memory_errors_explained
from meshwise.memory.tiers import Tiers
from meshwise.model.forward import eval_mode
from meshwise.model.parameter_table import ParameterTable
from meshwise.optim.flat_optimizer import state_tensors
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.schedules.action import Schedule
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import KINDS, dtype_names


class Trainer:
    """A model under a plan. `parallelize` makes it."""

    def __init__(
        self,
        engine: Engine,
        *,
        runner: MicrobatchRunner,
        plan: Plan,
        recipe: UpdateRecipe,
        optimizer: torch.optim.Optimizer,
        policy: ActivationPolicy,
    ) -> None:
        """`policy`: which activations are recomputed or moved to a tier."""
        self.plan = plan
        self.optimizer = optimizer
        self._engine = engine
        self._runner = runner
        self._recipe = recipe
        self._policy = policy
        self._update, when = build_update(engine, optimizer=optimizer, early=recipe.early)
        self._state = TrainingState(engine, update=self._update, plan=plan)
        self._stepping = TrainingSteps(engine, runner=runner, plan=plan, recipe=recipe, updating=when, policy=policy)

    @property
    def model(self) -> nn.Module:
        """The user's module; under zero=3 its parameters are whole only while it runs.

        With pp, this rank's stage of it, a module of the same class; where the rank has several, a list of them.
        """
        return self._engine.module

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model, or the stages of it that this rank has."""
        return self._engine.modules

    @property
    def units(self) -> Sequence[LiveUnit]:
        """Units: the parameters that this rank stores, gathered and reduced together."""
        return self._engine.units

    @property
    def blocks(self) -> RecomputedBlocks:
        """Blocks that are recomputed in the backward, and the costs that a budget chose by."""
        return self._policy.blocks

    @property
    def tiers(self) -> Tiers:
        """Tiers in which state rests between its uses."""
        return self._engine.tiers

    @property
    def activations(self) -> ActivationTier | None:
        """The tier of what forwards save; None where it stays on the device."""
        return self._policy.activations

    @property
    def precision(self) -> Mapping[str, str]:
        """The dtypes that this rank works in, read from its tensors: `parameters`, `compute`, `reduction`,
        `accumulation`, `master`, `optimizer_state` and `buffers`.

        Gradients and optimizer state are made in the first step; before it, these say what they will be.
        """
        buckets = [bucket for unit in self._engine.units for bucket in unit.buckets]
        found = {kind: {one[kind] for one in (bucket.dtypes() for bucket in buckets) if kind in one} for kind in KINDS}
        found["compute"] = {self._recipe.precision.computes or dtype for dtype in found["parameters"]}
        found["buffers"] = {buffer.dtype for module in self.modules for buffer in module.buffers()}
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        if made := {value.dtype for value in states if isinstance(value, Tensor) and value.dim()}:
            found["optimizer_state"] = made
        return dtype_names(found)

    @property
    def table(self) -> ParameterTable:
        """Parameter table: one row per logical parameter."""
        return self._engine.table

    @property
    def world(self) -> World:
        """World that joins the ranks."""
        return self._engine.world

    @property
    def schedule(self) -> Schedule:
        """Schedule: what each rank along `pp` does in a step, in order."""
        return self._runner.schedule

    @property
    def cut(self) -> ModelCut | None:
        """With pp, which stage runs what, what they send, and how even they are: prints as a table."""
        return self._runner.cut

    # ---- training ----------------------------------------------------------------------------------------------

    def share(self, size: int) -> tuple[int, int]:
        """[start, stop) of the rows that this rank takes of a global batch of `size` rows."""
        shards = self._stepping.sharder.shards(size)
        return shards.shares[shards.index]

    def step(
        self, batch: Any, *, local: bool = False, total: int | None = None, only: Collection[int] | None = None
    ) -> StepResult:
        """Train one optimizer step on a batch, a tree of tensors whose dim 0 counts the samples; return its result.

        `batch` is the global batch, the same on every rank; each rank takes its share. With `local=True` it is this
        rank's part already, and may have no rows. Rows that do not divide evenly are fine. Dropout depends on a row's
        number in the global batch. So a local part needs the number of rows in `total`, cut as `share` says; by default
        all parts are as long as this one. `only` skips all micro-batches except those with these numbers: a rehearsal
        need not run equal ones.

        Raises NonFiniteError when the loss or the gradient is not finite and the policy says so. Raises RanksDisagree
        when the ranks called different collectives or were given different global batches (by their shapes; in the
        first step also by content). Raises LossError when `loss` does not return (sum, count), and any error of model
        and loss. A step that raised has no effect: parameters, optimizer, running statistics and the next draws are as
        before. If all ranks have caught the error they may continue. Not so after an exception of the optimizer itself,
        and with nonfinite='end', which may have updated some units.
        """
        with memory_errors_explained(self.plan, memory=self.memory):
            return self._stepping.step(batch, local=local, total=total, only=only)

    def evaluate(self, batches: Iterable[Any], *, local: bool = False) -> EvalResult:
        """Return the loss over `batches` without training, the model in eval mode. Every rank passes as many
        batches.
        """
        total, tokens = zeros(self.world)
        with torch.no_grad(), eval_mode(self.model):
            for number, batch in enumerate(batches):
                self._runner.begin(-1 - number)  # what the model draws is the same under every plan, as in steps
                parts = self._stepping.sharder.cut(batch, local=local, total=None, parts=self._runner.evaluated_in)
                with memory_errors_explained(self.plan, memory=self.memory):
                    loss, count = self._runner.evaluate(parts)
                total += loss
                tokens += count
        sums = torch.stack([total, tokens])
        self.world.all_reduce(sums, axes=("pp", *self.plan.loss_axes)).wait()
        loss_sum, count_sum = sums.tolist()
        check_count(count_sum)
        return EvalResult(loss_sum / count_sum if count_sum else math.nan, int(count_sum))

    def predict(self, batch: Any) -> Any:
        """Return the output of the model for this rank's `batch`, without gradients and in eval mode.

        Every rank calls it as often as the others: the parameters may have to be gathered.
        """
        with torch.no_grad(), eval_mode(self.model):
            return self._runner.predict(batch)

    # ---- the whole of things -----------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, in table order. Every rank must iterate to the end.

        The tensor is the caller's only until the next one: copy what is to be kept.
        """
        return self._engine.full_parameters()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full gradient) of the last step, averaged, before clipping. Every rank iterates to the end.

        Raises RuntimeError when the last step was skipped or raised: what its gradients hold is not finite, or a part.
        """
        if not self._stepping.applied:
            raise RuntimeError(
                "the last step was skipped or raised an exception, so it has no gradients to show; see "
                "StepResult.problem"
            )
        for name, gradient in self._engine.full_gradients():
            yield name, gradient / self._stepping.clipped

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of every buffer, of all stages. Every rank iterates to the end."""
        return self._engine.full_buffers()

    def memory(self) -> dict[str, int]:
        """Return the bytes of model state on this rank.

        `parameters` (with fp32 masters), `gradients`, `optimizer` and `reduction` state. `gathered_peak` is the most
        parameters that were gathered at one time. Bytes on another tier have keys of their own, such as
        `disk/optimizer`; `staging` are the buffers on the way there. Of activations on another tier it is their peak.
        """
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
        """Save all that the next step depends on, and `extra` (JSON values, the first rank's). Every rank calls it.

        With `wait=False` training may continue at once; only the next update waits until the tensors that it changes
        have been read. `keep_last` removes the checkpoints beside it that are older than so many valid ones. Raises
        SaveError on every rank when this save (with `wait`), or the one before, came to nothing; what was saved earlier
        is as it was.
        """
        kept = {**self._stepping.state(), "user": dict(extra or {})}
        saving = self._state.save(Path(folder), extra=kept, keep_last=keep_last)
        if wait:
            saving.wait()
        return saving

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Load a checkpoint that any plan has saved, and return its `extra`. Every rank calls it.

        Of a Hugging Face folder it takes the parameters, each rank its own; training begins anew.

        Raises DamageError on every rank when it is torn or altered; only another load then makes this a model again.
        ValueError, with nothing changed, when it is of another model or optimizer.
        """
        return self._resumed(self._state.load(Path(folder)))

    def restore(self, root: str | Path) -> RestoredState | None:
        """Load the newest valid checkpoint of a folder of checkpoints; None when there is none. Every rank calls it.

        Raises DamageError when there are some and not one is valid.
        """
        restored = self._state.restore(Path(root))
        return restored and replace(restored, extra=self._resumed(restored.extra))

    def _resumed(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stepping.load_state(kept)
        return dict(kept["user"])

    def close(self) -> None:
        """Take the hooks off the model."""
        self._update.close()
        self._state.close()
        self._engine.close()
        self._runner.close()
        self._engine.tiers.close()
        self._policy.close()
