"""Cut a model into pipeline stages: rank 0 runs it on an example batch, and sends the whole cut to all ranks."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.job_processes import RankLostError
from meshwise.comm.api.world import World
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import Forward, Loss, LossError, call_loss
from meshwise.model.parameter_units import Patterns
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, MatrixPairs, ModelCut, cut_model, cut_pieces
from meshwise.pipeline.cut.piece_calls import CutError
from meshwise.pipeline.schedules.named_schedules import planned_schedule
from meshwise.pipeline.schedules.schedule_table import Schedule, ScheduleError
from meshwise.plan import Plan, PlanError
from meshwise.plan.plan_keys import is_path
from meshwise.tensor.core.part import Part


@dataclass(frozen=True)
class CutInputs:
    """Inputs of a cut: an example batch, how the model runs on it, and where it may be cut."""

    batch: Any
    """Example batch, a tree of tensors whose dim 0 counts the rows; None raises PlanError when the model is cut."""
    forward: Forward
    """`forward(model, batch) -> output`."""
    options: CutOptions
    """Places at which the user lets the model be cut."""
    loss: Loss | None = None
    """`loss(output, batch) -> (sum, count)`: the computation of the loss is cut; None: that of the output is cut."""
    pairs: MatrixPairs = field(default_factory=MatrixPairs)
    """Matrices that tensor parallelism splits in pairs; no stage begins between the two of a pair."""


def plan_schedule(plan: Plan) -> Schedule:
    """Return the table of the plan's schedule. Raises PlanError when it excludes the plan's pp or micro-batches."""
    try:
        return planned_schedule(
            plan.schedule, pp=plan.pp, microbatches=plan.microbatches, virtual_stages=plan.virtual_stages
        )
    except ScheduleError as error:
        raise PlanError(str(error)) from None


def agreed_schedule(plan: Plan, *, world: World) -> Schedule:
    """Return the table of the plan's schedule (collective). Raises PlanError when ranks have read different tables."""
    schedule = plan_schedule(plan)
    if is_path(plan.schedule) and len(set(world.exchange(str(schedule)))) > 1:
        raise PlanError(f"the ranks have different tables in schedule={plan.schedule}; give all hosts the same file")
    return schedule


def cut_source(
    source: ParameterSource, *, plan: Plan, schedule: Schedule, example: CutInputs, device: torch.device
) -> ModelCut:
    """Return the cut of a model for the stages of a schedule; the model runs on one micro-batch of the example.

    The example is copied to the model's device, or to `device` if the model is on the meta device. Raises PlanError
    without an example, for an example without rows, and when the model cannot be cut."""
    if example.batch is None:
        raise PlanError(
            f"pp={plan.pp}: the model must run once, to be cut into stages; give a batch: Options(example=batch)"
        )
    if not tree.row_count(example.batch):
        raise PlanError("the batch in Options(example=batch) has no rows, so the model cannot be run on it to be cut")
    shares = plan.microbatches * math.prod(plan.mesh().degree(axis) for axis in plan.row_axes)
    rows = max(1, tree.row_count(example.batch) // shares)
    device = device if source.deferred else next(source.module.parameters()).device
    micro = tree.map_tensors(lambda tensor: tensor.to(device), tree.take_rows(example.batch, start=0, stop=rows))

    def run(model: nn.Module, given: Any) -> Any:
        if example.loss is None or source.deferred:
            return example.forward(model, given)
        return call_loss(model, given, forward=example.forward, loss=example.loss)[0]

    request = CutRequest(by=plan.partition, where=example.options, schedule=schedule, pairs=example.pairs)  # type: ignore[arg-type]
    try:
        return cut_and_note_writes(source.module, stages=schedule.stages, micro=micro, run=run, request=request)
    except CutError as error:
        raise PlanError(f"the plan '{plan}' cannot work for this model: {error}") from None


class CopiedBatchRun:
    """Callable that calls `run(model, copy of a micro-batch)`, and notes whether the model writes to the copy."""

    def __init__(self, micro: Any, *, run: Callable[[nn.Module, Any], Any]) -> None:
        self._micro, self._run = micro, run
        self.written = False
        """True once a run has changed a tensor of its copy in place."""

    def __call__(self, model: nn.Module) -> Any:
        """Run the model on a fresh copy of the micro-batch, and return what `run` returns."""
        given = tree.map_tensors(torch.clone, self._micro)
        before = [tensor._version for tensor in tree.tensors(given)]
        try:
            return self._run(model, given)
        finally:
            self.written |= [tensor._version for tensor in tree.tensors(given)] != before


def cut_and_note_writes(
    model: nn.Module, *, stages: int, micro: Any, run: Callable[[nn.Module, Any], Any], request: CutRequest
) -> ModelCut:
    """Return the cut of a model; its field `writes` is true if the model changes its batch in place.

    `run(model, micro)` returns the output or the loss."""
    call = CopiedBatchRun(micro, run=run)
    cut = cut_model(model, stages=stages, call=call, request=request)
    # With CutOptions.made the model does not run, and `writes` of that cut stays.
    return dataclasses.replace(cut, writes=call.written or cut.writes)


def finest_cut(
    model: nn.Module, *, micro: Any, run: Callable[[nn.Module, Any], Any], pieces: Patterns = ()
) -> ModelCut | None:
    """Return the cut in which every piece with parameters begins a stage; None if that is only one stage.

    `micro`, `run`: as in `cut_and_note_writes`. `pieces`: as in `CutOptions`."""
    call = CopiedBatchRun(micro, run=run)
    cut = cut_pieces(model, call=call, pieces=pieces)
    return dataclasses.replace(cut, writes=call.written) if cut.stages > 1 else None


def cut_on_first_rank(make: Callable[[], ModelCut], *, world: World) -> ModelCut:
    """Call `make` on the first rank only, and return its result on every rank (collective).

    A PlanError or LossError of `make` is raised on every rank. For any other error the other ranks raise RankLostError.
    """
    cut: ModelCut | None = None
    error: Exception | None = None
    kind: type[Exception] = RankLostError
    problem = ""
    if world.rank == 0:
        try:
            cut = make()
        except (PlanError, LossError) as refused:  # raised below, after the other ranks have received it
            kind = PlanError if isinstance(refused, PlanError) else LossError
            error, problem = refused, f"{refused}"
        except Exception as raised:  # noqa: BLE001 -- raised below, after the other ranks have received it
            error, problem = raised, f"rank 0 could not cut the model: {type(raised).__name__}: {raised}"
            error.add_note("while the model ran on the example batch, to be cut into stages")
    cut, kind, problem = world.exchange((cut, kind, problem))[0]
    if error is not None:
        raise error
    if cut is None:
        raise kind(problem)
    return cut


def matrix_pairs(parts: Mapping[str, Part]) -> MatrixPairs:
    """Return the names of the colwise and the rowwise matrices in `parts`, the role of each module under tp.

    Between two such matrices the ranks of tp have different features, so no stage begins there."""
    colwise, rowwise = (
        frozenset(name for name, part in parts.items() if part.role == role) for role in ("colwise", "rowwise")
    )
    return MatrixPairs(colwise, rowwise)
