"""The cut of a model under a plan: one cut for all ranks, made by the first from one micro-batch of an example."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.rank_lost import RankLostError
from meshwise.comm.api.world import World
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import Forward, Loss, LossError, call_loss
from meshwise.model.parameter_units import Patterns
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, ModelCut, UncutModules, cut_model, cut_pieces
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.schedules import planned_schedule
from meshwise.pipeline.schedules.action import Schedule, ScheduleError
from meshwise.plan import Plan, PlanError
from meshwise.plan.plan_keys import is_path
from meshwise.tensor.core.part import Part


@dataclass(frozen=True)
class CutExample:
    """Example for the cut: a batch, how the model is called on it, and the loss."""

    batch: Any
    forward: Forward
    where: CutOptions
    loss: Loss | None = None
    pairs: UncutModules = field(default_factory=UncutModules)


def plan_schedule(plan: Plan) -> Schedule:
    """Return the plan's table, which sends first where that is ours to say. Raises PlanError when there is none for its
    numbers.
    """
    try:
        return planned_schedule(
            plan.schedule, pp=plan.pp, microbatches=plan.microbatches, virtual_stages=plan.virtual_stages
        )
    except ScheduleError as error:
        raise PlanError(str(error)) from None


def agreed_schedule(plan: Plan, *, world: World) -> Schedule:
    """Return the same, of a file on every rank. Raises PlanError when they have read different ones."""
    schedule = plan_schedule(plan)
    if is_path(plan.schedule) and len(set(world.exchange(str(schedule)))) > 1:
        raise PlanError(f"the ranks have different tables in schedule={plan.schedule}; give all hosts the same file")
    return schedule


def cut_source(
    source: ParameterSource, *, plan: Plan, schedule: Schedule, example: CutExample, device: torch.device
) -> ModelCut:
    """Return the cut of a model for the stages of a schedule; `device` is where an example goes whose model has no
    values.

    Raises PlanError without an example, when the model has too few pieces, and when it cannot be cut.
    """
    if example.batch is None:
        raise PlanError(
            f"pp={plan.pp} cuts the model by running it once; give a batch like those to come: Options(example=batch)"
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

    request = CutRequest(by=plan.partition, where=example.where, schedule=schedule, pairs=example.pairs)  # type: ignore[arg-type]
    try:
        return cut_for(source.module, stages=schedule.stages, micro=micro, run=run, request=request)
    except CutError as error:
        raise PlanError(f"the plan '{plan}' cannot work for this model: {error}") from None


class CopiedBatchRun:
    """Runs a model on copies of a micro-batch, and knows whether it writes to them."""

    def __init__(self, micro: Any, *, run: Callable[[nn.Module, Any], Any]) -> None:
        self._micro, self._run = micro, run
        self.written = False

    def __call__(self, model: nn.Module) -> Any:
        """Return the output of the model on copies of the micro-batch."""
        given = tree.map_tensors(torch.clone, self._micro)
        before = [tensor._version for tensor in tree.tensors(given)]
        try:
            return self._run(model, given)
        finally:
            self.written |= [tensor._version for tensor in tree.tensors(given)] != before


def cut_for(
    model: nn.Module, *, stages: int, micro: Any, run: Callable[[nn.Module, Any], Any], request: CutRequest
) -> ModelCut:
    """Return the cut of a model that runs on copies of a micro-batch, with whether it writes to them."""
    call = CopiedBatchRun(micro, run=run)
    cut = cut_model(model, stages=stages, call=call, request=request)
    return dataclasses.replace(cut, writes=call.written or cut.writes)  # one that was made before is not made again


def finest_cut(
    model: nn.Module, *, micro: Any, run: Callable[[nn.Module, Any], Any], pieces: Patterns = ()
) -> ModelCut | None:
    """Return the same with a stage for each piece that has parameters; None where that is one."""
    call = CopiedBatchRun(micro, run=run)
    cut = cut_pieces(model, call=call, pieces=pieces)
    return dataclasses.replace(cut, writes=call.written) if cut.stages > 1 else None


def first_ranks(make: Callable[[], ModelCut], *, world: World) -> ModelCut:
    """Return the cut that the first rank makes. A refusal is raised on every rank. An error of the model itself is
    raised where it happened; the other ranks only report that it did.
    """
    cut: ModelCut | None = None
    error: Exception | None = None
    kind: type[Exception] = RankLostError
    problem = ""
    if world.rank == 0:
        try:
            cut = make()
        except (PlanError, LossError) as refused:  # raised below, when the others know
            kind = PlanError if isinstance(refused, PlanError) else LossError
            error, problem = refused, f"{refused}"
        except Exception as raised:  # noqa: BLE001 -- as well
            error, problem = raised, f"rank 0 could not cut the model: {type(raised).__name__}: {raised}"
            error.add_note("while the model ran on an example, to be cut")
    cut, kind, problem = world.exchange((cut, kind, problem))[0]
    if error is not None:
        raise error
    if cut is None:
        raise kind(problem)
    return cut


def pairs_of(parts: Mapping[str, Part]) -> UncutModules:
    """Return the matrices between which ranks of tensor parallelism have different features."""
    first, second = (
        frozenset(name for name, part in parts.items() if part.role == role) for role in ("colwise", "rowwise")
    )
    return UncutModules(first, second)
