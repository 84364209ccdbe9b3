"""Compute the table of a plan's schedule, and cut a model into the stages of the table by running it on a batch."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import Forward, Loss, call_loss, no_loss
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, ModelCut, cut_model
from meshwise.pipeline.cut.probe_result import CutError
from meshwise.pipeline.schedules.named_schedules import planned_schedule
from meshwise.pipeline.schedules.schedule_table import Schedule
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.module_role import Part


def plan_schedule(plan: Plan) -> Schedule:
    """Return the table of the plan's schedule. Raises ScheduleError if it cannot run the plan's pp or micro-batches."""
    return planned_schedule(
        plan.schedule, pp=plan.pp, microbatches=plan.microbatches, virtual_stages=plan.virtual_stages
    )


def cutter(
    model: nn.Module,
    *,
    plan: Plan,
    schedule: Schedule,
    where: CutOptions,
    parts: Mapping[str, Part] = MappingProxyType({}),
) -> Callable[..., ModelCut]:
    """Return a function `make(call=…)` that cuts `model` into the stages of `schedule`; `call(model)` runs the model.

    `where`: where stages may begin. `parts`: the role of each module under tp."""
    roles = {name: part.role for name, part in parts.items()}
    request = CutRequest(by=plan.partition, options=where, schedule=schedule, roles=roles)  # type: ignore[arg-type]
    return partial(cut_model, model, stages=schedule.stages, request=request)


def cut_source(
    source: ParameterSource,
    *,
    plan: Plan,
    make: Callable[..., ModelCut],
    example: Any,
    forward: Forward,
    loss: Loss | None = None,
    device: torch.device,
) -> ModelCut:
    """Run the model on one micro-batch of the batch `example`, and return the cut that `make` (from `cutter`) makes.

    The example is copied to the model's device, or to `device` for a model without values. A model with values also
    computes the `loss`, if there is one. Raises PlanError without an example with rows, or for a model without cut."""
    if example is None:
        needs = "a loss function for trainer.step (pp allows no open_step), and " if loss is no_loss else ""
        raise PlanError(
            f"pp={plan.pp}: to be cut, the model must run once; give {needs}a batch: Options(example=batch)"
        )
    if not tree.row_count(example):
        raise PlanError("the batch in Options(example=batch) has no rows, so the model cannot be run on it to be cut")
    rows = max(1, tree.row_count(example) // (plan.microbatches * plan.row_parts))
    device = device if source.deferred else next(source.module.parameters()).device
    micro = tree.map_tensors(lambda tensor: tensor.to(device), tree.take_rows(example, start=0, stop=rows))

    def run(model: nn.Module, given: Any) -> Any:
        if loss is None or source.deferred:
            return forward(model, given)
        return call_loss(model, given, forward=forward, loss=loss)[0]

    try:
        return cut_on(micro, make=make, run=run)
    except CutError as error:
        raise PlanError(f"the plan '{plan}' cannot work for this model: {error}") from None
    except Exception as error:
        error.add_note("while the model ran on the example batch, to be cut into stages")
        raise


def cut_on(micro: Any, *, make: Callable[..., ModelCut], run: Callable[[nn.Module, Any], Any]) -> ModelCut:
    """Return the cut that `make` makes; `run(model, batch)` runs the model on a copy of the micro-batch `micro`."""
    return make(call=lambda model: run(model, tree.map_tensors(torch.clone, micro)))
