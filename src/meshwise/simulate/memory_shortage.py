"""Explain an out-of-memory error: the predicted memory, the memory in use, and the cheapest plan that fits.

An out-of-memory error names only the bytes of the last allocation. This file rehearses the plan to predict its memory
by category. Then it rehearses plans that need less memory, from the cheapest change to the most expensive one, until a
plan fits the available memory.

If a process exceeds the memory of its machine or cgroup, the system kills it without an error. Then the process
that started it explains the end with this file (`cli/train_command.py`)."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.base.text_format import align_columns
from meshwise.comm.api.streams import gpu_count
from meshwise.engine.parallelize import Options
from meshwise.model.forward import Loss
from meshwise.optim.flat_optimizer import OptimizerClass
from meshwise.plan import Plan, PlanError
from meshwise.simulate.available_memory import room_left
from meshwise.simulate.memory_use import memory_of
from meshwise.simulate.meta_value_errors import asks_for_values
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.rehearsal_subject import Device, RehearsalSubject
from meshwise.simulate.simulation_tables import by_category, size_text

CHANGES = (
    "",
    "microbatches=*2",
    "microbatches=*4",
    "recompute=selective",
    "recompute=full",
    "offload=optimizer:cpu",
    "recompute=full offload=optimizer:cpu",
    "offload=optimizer:disk",
    "offload=optimizer:disk,gradients:disk",
    "recompute=full offload=optimizer:disk,gradients:disk",
    "zero=3 offload=optimizer:disk,gradients:disk,params:disk",
    "zero=3 recompute=full offload=optimizer:disk,gradients:disk,params:disk",
)
"""Changes of a plan that save memory, the cheapest in time first: smaller micro-batches, recomputation, offload to the
host, offload to disk; `*2` multiplies. Each is tried with every `zero` from the plan's value to 3, cheapest first."""


class ShortageError(MemoryError):
    """Out-of-memory error of a rank. `used`: bytes that the rank used, by category, as in `Trainer.memory`."""

    def __init__(self, message: str, *, used: Mapping[str, int]) -> None:
        super().__init__(message)
        self.used = used

    def __reduce__(self) -> "tuple[partial[ShortageError], tuple[Any, ...]]":
        """Return how to unpickle this error together with `used`; the default would pickle only the message."""
        return partial(ShortageError, used=self.used), self.args


@dataclass(frozen=True)
class MemoryShortage:
    """Memory that a plan needs on the fullest rank, the memory it may use, and the cheapest plan that fits.

    predicted       bytes by category; empty if nothing could be predicted
    used            bytes by category at the time of the error; empty if nothing has run
    room            bytes that the rank may use
    fitting         cheapest plan that fits: `plan` itself if it fits, None if no plan was found
    fitting_needs   bytes that `fitting` needs
    unpredictable   reason why the memory of this model cannot be predicted, or ""
    """

    plan: Plan
    predicted: Mapping[str, int]
    used: Mapping[str, int]
    room: int
    fitting: Plan | None = None
    fitting_needs: int = 0
    unpredictable: str = ""

    def __str__(self) -> str:
        cell = lambda sizes, kind: size_text(sizes[kind]) if kind in sizes else ""  # noqa: E731
        kinds = dict.fromkeys([*self.predicted, *self.used])
        rows = [("", "predicted", "when it failed" if self.used else "")]
        rows += [(kind, cell(self.predicted, kind), cell(self.used, kind)) for kind in kinds]
        rows += [("in all", size_text(sum(self.predicted.values())), "")] if self.predicted else []
        rows += [("room", size_text(self.room), "")]
        lines = [f"  {line}" for line in align_columns(rows).split("\n")]
        advice = (
            "no change of the plan makes this model fit here; try more ranks, a smaller batch or, for state on disk, "
            "smaller staging buffers (swap.megabytes of a job, SwapConfig(buffer=…) in Options)"
        )
        if self.unpredictable:
            advice = f"the memory of plans for this model cannot be predicted without values: {self.unpredictable}"
        if self.fitting == self.plan:
            advice = "it fits"
        elif self.fitting is not None:
            advice = f"the cheapest change that fits: '{self.fitting}' ({size_text(self.fitting_needs)})"
        return "\n".join([f"the plan '{self.plan}' on a rank:", *lines, advice])


class MemoryNeeds:
    """Predicted bytes by category on the fullest rank, for any plan of a training. Each plan is rehearsed once."""

    def __init__(self, subject: RehearsalSubject, *, ranks: int, shared: bool = False) -> None:
        """`shared`: all ranks are processes of one host. If this host has no GPU, they share memory."""
        self.device: Device = "cuda" if gpu_count() else "cpu"
        self.rows = tree.row_count(subject.batch)
        self._subject, self._ranks, self._shared = subject, ranks, shared and self.device == "cpu"
        self._known: dict[Plan, Mapping[str, int]] = {}

    def of(self, plan: Plan) -> Mapping[str, int]:
        """Return the bytes by category on the fullest rank. Raises the errors of `rehearse`."""
        if plan not in self._known:
            found = rehearse(self._subject, plan=plan, ranks=self._ranks, device=self.device, shared=self._shared)
            self._known[plan] = by_category(memory_of(found))
        return self._known[plan]

    def total(self, plan: Plan) -> float:
        """Return the total bytes on the fullest rank; infinity for a plan that cannot be rehearsed with this model."""
        try:
            return sum(self.of(plan).values())
        except (ValueError, RuntimeError):
            return math.inf


def shortage(needs: MemoryNeeds, *, plan: Plan, room: int, used: Mapping[str, int]) -> MemoryShortage:
    """Return the predicted memory of `plan`, which ran out of memory, and the cheapest plan that fits into `room`."""
    try:
        predicted = needs.of(plan)
    except (ValueError, RuntimeError) as error:
        return MemoryShortage(plan, {}, used, room, unpredictable=str(error))
    for change in CHANGES:
        candidates = list(_changed(plan, change, needs=needs))
        # The last candidate needs (almost) the least memory. If it does not fit, the others are not rehearsed.
        if candidates and needs.total(candidates[-1]) <= room:
            candidate = next(one for one in candidates if needs.total(one) <= room)
            return MemoryShortage(plan, predicted, used, room, candidate, int(needs.total(candidate)))
    return MemoryShortage(plan, predicted, used, room)


def needs(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan | str,
    *,
    loss: Loss,
    batch: Any,
    optimizer: OptimizerClass = torch.optim.AdamW,
    options: Options | None = None,
    **optimizer_arguments: Any,
) -> MemoryShortage:
    """Return the memory that a plan needs on each rank of this host; if too much, also the cheapest plan that fits.

    Print the result. Call this function with the arguments of `parallelize` and a typical global batch, before
    `parallelize` changes the model. It allocates no tensors of the model's size. Raises PlanError if the plan does not
    fit the model, ValueError for `dp=auto`."""
    plan = Plan.of(plan)
    ranks = plan.mesh().size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    subject = RehearsalSubject(model, loss, batch, optimizer, optimizer_arguments, options or Options())
    found = MemoryNeeds(subject, ranks=ranks, shared=here == ranks)
    room = room_left(torch.device(found.device), ranks=here)
    try:
        predicted = found.of(plan)
    except RuntimeError as error:
        if not asks_for_values(error):
            raise
        return MemoryShortage(plan, {}, {}, room, unpredictable=str(error))
    if sum(predicted.values()) <= room:
        return MemoryShortage(plan, predicted, {}, room, plan, sum(predicted.values()))
    return shortage(found, plan=plan, room=room, used={})


def _changed(plan: Plan, change: str, *, needs: MemoryNeeds) -> Iterator[Plan]:
    """Yield the plan with a change of `CHANGES` and each `zero` from the plan's value to 3, in ascending order."""
    if needs.device == "cpu" and "optimizer:cpu" in change:
        return  # all tensors are in the host's memory already
    words = dict(word.split("=", 1) for word in change.split())
    for zero in range(plan.zero, 4 if plan.dp != 1 or "zero" in words else plan.zero + 1):
        if words.get("zero", str(zero)) != str(zero):
            continue
        changes: dict[str, str | int] = {**words, "zero": zero}
        if times := words.get("microbatches"):
            changes["microbatches"] = plan.microbatches * int(times.removeprefix("*"))
        try:
            candidate = Plan.from_toml({**plan.to_toml(), **changes})
        except PlanError:
            continue
        parts = candidate.microbatches * math.prod(candidate.mesh().degree(axis) for axis in candidate.row_axes)
        if candidate != plan and (not times or parts <= needs.rows):
            yield candidate
