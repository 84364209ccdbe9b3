"""Interpret a schedule: run this rank's row of actions, one after the other.

The table sets the order of computations and messages; `validate` has checked that no rank waits for ever.

    | 2RECV_F0                  receive: started where `receive_starts` says; at this action, the rank waits for it
    | 2F0                       forward of the stage; if the next stage is on this rank, it gets the output directly
    | 2SEND_F0                  start a send; its memory is freed when the receiver has answered, or at the row's end
    | 2B0 2I0 2W0               the backward, whole or in two parts (`stage_backward.py`)
    | 2GATHER 2FREE 2REDUCE     passed to the storage of the stage's parameters

`pack` splits the values that a stage sends into tensors and a skeleton, from which `unpack` rebuilds them. The skeleton
has the place, shape and dtype of each tensor, and whether a gradient comes back for it. A tensor that occurs twice is
sent once. The first message between two stages for each micro-batch shape starts with a header with the skeleton; later
messages are tensors alone. The actions of a micro-batch that does not run are left out on every rank."""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.world import Work, World, wait_all
from meshwise.pipeline.run.stage_backward import WeightBackward, backward_input, split_pays
from meshwise.pipeline.run.stage_forward import Stage, StageError, signature
from meshwise.pipeline.schedules.receive_starts import receive_starts
from meshwise.pipeline.schedules.schedule_table import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule


@dataclass(frozen=True)
class MicrobatchJob:
    """One micro-batch, as the interpreter runs it."""

    call: Callable[[nn.Module], Any]
    """Runs the model on the micro-batch; on the last stage it returns the loss from which the backward starts."""
    shapes: Hashable
    """Key for the shapes of the micro-batch, equal on every rank. With equal keys, messages have equal shapes."""
    batch: Any = None
    """The micro-batch, passed to `StageStorage.running`; None for a prediction."""


class StageStorage(Protocol):
    """Interface of the storage of a stage's parameters, as the interpreter uses it."""

    def running(self, index: int, *, batch: Any, again: bool) -> AbstractContextManager[None]:
        """Return a context in which micro-batch `index` runs: its forward, or its backward if `again`.

        `batch`: the micro-batch, from its job."""

    def gather(self) -> None:
        """Start to gather the parameters."""

    def ready(self) -> None:
        """Wait until the parameters are gathered."""

    def free(self) -> None:
        """Free the gathered parameters."""

    def reduce(self) -> None:
        """Sum the gradients over the ranks with other rows of the batch. Called after the stage's last backward."""


@dataclass
class _Flight:
    """State of a micro-batch in one stage, from its arrival to the end of its backward."""

    received: dict[str, Any] = field(default_factory=dict)
    """Values from the stage before, by key."""
    shapes: Mapping[str, Any] = field(default_factory=dict)
    """Outputs of pieces of earlier stages, as meta tensors by key."""
    leaves: list[Tensor] = field(default_factory=list)
    """Received tensors whose gradients are sent back."""
    outputs: list[Tensor] | None = None
    """Outputs that get a gradient from the next stage; None before the forward."""
    gradients: list[Tensor] = field(default_factory=list)
    weights: WeightBackward | None = None
    """Second part of the backward (W), after I has run; None before."""


Place = tuple[int, int]
"""(stage, micro-batch)."""

Header = tuple[Sequence[tuple[int, Any]], Mapping[str, Any]]
"""Start of a first message: (number, skeleton) for each sent value, and the shapes of pieces (`Stage.run`).

The number is the index of the value in `StageForwardState.sends`."""


class ScheduleInterpreter:
    """Interpreter of schedules for this rank's stages. It remembers the agreed shapes of messages between runs."""

    def __init__(self, stages: Mapping[int, Stage], *, storages: Mapping[int, StageStorage], world: World) -> None:
        self._stages, self._storages, self._world = stages, storages, world
        self._rank = world.group("pp").index
        self._trained = {
            index: [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
            for index, stage in stages.items()
        }
        self._agreed: dict[tuple[int, Hashable], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._broken_off = ""

    def run(self, schedule: Schedule, *, jobs: Mapping[int, MicrobatchJob]) -> dict[int, Any]:
        """Run this rank's row of the schedule for the micro-batches in `jobs`, which are keyed by number.

        Return the result of the last stage for each micro-batch; empty if another rank has the last stage. Raises any
        error of a stage, and StageError if a stage sends other shapes or numbers for micro-batches of equal shapes.
        Raises StageError also after a run that broke off, because its messages may still arrive."""
        if self._broken_off:
            raise StageError(
                f"an earlier step broke off {self._broken_off}, and its messages between stages may still arrive. "
                "Start the ranks again, and load the last checkpoint: trainer.load(path)"
            )
        try:
            return _ScheduleRun(self, schedule, jobs).run()
        except BaseException:
            self._broken_off = f"in {self._world.flight_recorder.doing} on rank {self._rank} of the pipeline"
            raise


class _ScheduleRun:
    """State of one run of a schedule on this rank."""

    def __init__(self, owner: ScheduleInterpreter, schedule: Schedule, jobs: Mapping[int, MicrobatchJob]) -> None:
        self._stages, self._storages, self._trained = owner._stages, owner._storages, owner._trained
        self._world, self._rank, self._agreed = owner._world, owner._rank, owner._agreed
        self._ranks, self._jobs, self._other_end = schedule.rank_of, jobs, schedule.other_end
        self._order = _row_order(schedule, frozenset(jobs), rank=owner._rank)
        self._flights: dict[Place, _Flight] = defaultdict(_Flight)
        self._leaving: dict[tuple[ActionKind, Place], tuple[Header | None, Sequence[Tensor]]] = {}
        self._returned: dict[int, Any] = {}
        self._started: dict[Action, tuple[Sequence[Tensor], Sequence[Work]]] = {}
        self._sending: dict[int, deque[list[Work]]] = defaultdict(deque)
        self._waited: dict[int, int] = defaultdict(int)

    def run(self) -> dict[int, Any]:
        """Run the actions of this rank's row in order; an error gets a note with the action and the rank."""
        for action in self._order.row:
            try:
                for receive in self._order.starts.get(action, ()):
                    self._start(receive)
                self._world.flight_recorder.doing = action
                self._do(action)
            except Exception as error:
                batch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
                error.add_note(f"in {action}: stage {action.stage}{batch}, on rank {self._rank} of the pipeline")
                raise
        for rank, sending in self._sending.items():
            self._release(rank, self._waited[rank] + len(sending))
        assert not self._flights, f"left in flight: {sorted(self._flights)}"
        return self._returned

    def _do(self, action: Action) -> None:
        storage, kind = self._storages[action.stage], action.kind
        if kind in COMPUTE:
            storage.ready()
            self._compute(kind, _place(action))
        elif kind in SENDS:
            self._send(action)
        elif kind in RECEIVES:
            self._receive(action)
        else:
            {"GATHER": storage.gather, "FREE": storage.free, "REDUCE": storage.reduce}[kind]()

    # ---- computing ---------------------------------------------------------------------------------------------

    def _compute(self, kind: ActionKind, place: Place) -> None:
        batch = self._jobs[place[1]].batch
        with self._storages[place[0]].running(place[1], batch=batch, again=kind is not ActionKind.F):
            if kind is ActionKind.F:
                self._forward(place)
            elif kind is ActionKind.W:
                weights = self._flights[place].weights
                assert weights is not None
                weights.run()
            else:
                self._backward(place, whole=kind is ActionKind.B)
        if kind in (ActionKind.B, ActionKind.W) or not torch.is_grad_enabled():
            del self._flights[place]

    def _forward(self, place: Place) -> None:
        index, flight = place[1], self._flights[place]
        stage, job = self._stages[place[0]], self._jobs[index]
        last = stage.index + 1 == stage.count
        note_shapes = not last and (stage.index, job.shapes) not in self._agreed
        result = stage.run(job.call, received=flight.received, shapes=flight.shapes, note_shapes=note_shapes)
        flight.received = {}
        if last:
            training = torch.is_grad_enabled()
            self._returned[index] = result.detach() if training else result  # the loss itself would keep its graph
            flight.outputs = [result] if training and result.requires_grad else []
            flight.gradients = [torch.ones_like(output) for output in flight.outputs]
            return
        skeleton, parts = pack(result)
        specs = tensor_specs(skeleton)
        self._keep_gradients(stage, index, specs)
        flight.outputs = [tensor for spec, tensor in zip(specs, parts, strict=True) if spec.requires_grad]
        detached = [tensor.detach() for tensor in parts]
        if self._ranks[stage.index + 1] == self._rank:
            self._agreed.setdefault((stage.index, job.shapes), (skeleton, stage.state.shapes))
            self._deliver((stage.index + 1, index), skeleton, detached)
        else:
            header, sent = self._header(stage, index, skeleton), [part.contiguous() for part in detached]
            self._leaving[ActionKind.SEND_F, place] = header, sent

    def _keep_gradients(self, stage: Stage, index: int, specs: Sequence[Tensor]) -> None:
        """Let gradients come back for the same tensors in each step, even if other parameters are frozen.

        The next stage does not know what is frozen here. It sends gradients that `_backward` ignores."""
        agreed, _ = self._agreed.get((stage.index, self._jobs[index].shapes), (None, None))
        if agreed is None:
            frozen = torch.is_grad_enabled() and not all(one.requires_grad for one in self._trained[stage.index])
            keeps = [frozen] * len(specs)
        else:
            keeps = [known.requires_grad for known in tensor_specs(agreed)]
        for spec, kept in zip(specs, keeps, strict=False):
            if kept and spec.is_floating_point():
                spec.requires_grad_()

    def _backward(self, place: Place, *, whole: bool) -> None:
        stage, index = place
        flight = self._flights[place]
        assert flight.outputs is not None
        flight.weights = WeightBackward()
        trained = self._trained[stage]
        whole = whole or (place in self._order.adjacent and not split_pays(flight.leaves, parameters=trained))
        given = zip(flight.outputs, flight.gradients, strict=True)
        pairs = [(output, gradient) for output, gradient in given if output.requires_grad]  # else all is frozen
        outputs, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        if outputs and whole:
            torch.autograd.backward(outputs, gradients)
        elif outputs:
            flight.weights = backward_input(outputs, gradients=gradients, received=flight.leaves, parameters=trained)
        flight.outputs, flight.gradients = [], []
        if stage > 0:
            back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in flight.leaves]
            flight.leaves = []
            if self._ranks[stage - 1] == self._rank:
                self._flights[stage - 1, index].gradients = back
            else:
                self._leaving[ActionKind.SEND_B, place] = None, [part.contiguous() for part in back]

    def _deliver(self, place: Place, skeleton: Mapping[str, Any], arrived: Sequence[Tensor]) -> None:
        """Make the arrived tensors the received values of a stage, as leaves that may require gradients."""
        flight = self._flights[place]
        _, flight.shapes = self._agreed[place[0] - 1, self._jobs[place[1]].shapes]
        for tensor, spec in zip(arrived, tensor_specs(skeleton), strict=True):
            tensor.requires_grad_(spec.requires_grad)
        flight.received = unpack(skeleton, arrived=arrived)
        flight.leaves = [tensor for tensor in arrived if tensor.requires_grad]

    # ---- sending -----------------------------------------------------------------------------------------------

    def _header(self, stage: Stage, index: int, skeleton: Mapping[str, Any]) -> Header | None:
        """Return the header of a message with new shapes, or None if the next stage knows the shapes."""
        key = (stage.index, self._jobs[index].shapes)
        if key not in self._agreed:
            self._agreed[key] = skeleton, stage.state.shapes
            return [(stage.state.sends.index(name), value) for name, value in skeleton.items()], stage.state.shapes
        agreed, _ = self._agreed[key]
        now, before = _description(skeleton), _description(agreed)
        for name in agreed:
            if now[name] != before[name]:
                raise StageError(
                    f"stage {stage.index} sends as {name}, for micro-batch {index}, {_as_text(skeleton[name])}, but "
                    f"sent {_as_text(agreed[name])} for another one of the same shapes. Only values of tensors may "
                    "differ, not shapes, dtypes, gradients or numbers. Return a number that differs as a tensor"
                )
        return None

    def _send(self, action: Action) -> None:
        rank, (header, parts) = self._other_end(action), self._leaving.pop((action.kind, _place(action)))
        sends = [] if header is None else self._world.send_value(header, axis="pp", to=rank)
        sends += [self._world.send(part, axis="pp", to=rank) for part in parts if part.numel()]
        self._sending[rank].append(sends)

    def _release(self, rank: int, count: int) -> None:
        """Wait for the first `count` messages to a rank, which has received them, and free their memory."""
        while self._waited[rank] < count:
            wait_all(self._sending[rank].popleft())
            self._waited[rank] += 1

    # ---- receiving ---------------------------------------------------------------------------------------------

    def _start(self, action: Action) -> None:
        """Start a receive; wait for its header first, if it has one."""
        source = self._other_end(action)
        made = [
            torch.empty(spec.shape, dtype=spec.dtype, device=self._world.device)
            for spec in self._expected(action, source=source)
        ]
        self._started[action] = (made, [self._world.recv(x, axis="pp", source=source) for x in made if x.numel()])

    def _expected(self, action: Action, *, source: int) -> Sequence[Tensor]:
        """Return tensors with the shapes of a message."""
        stage, index = place = _place(action)
        if action.kind is ActionKind.RECV_B:
            outputs = self._flights[place].outputs
            assert outputs is not None
            return outputs
        key = (stage - 1, self._jobs[index].shapes)
        if key not in self._agreed:
            values, shapes = self._world.recv_value(axis="pp", source=source)
            self._agreed[key] = {self._stages[stage].receives[number]: value for number, value in values}, shapes
        return tensor_specs(self._agreed[key][0])

    def _receive(self, action: Action) -> None:
        stage, index = place = _place(action)
        if action not in self._started:
            self._start(action)
        arrived, works = self._started.pop(action)
        wait_all(works)
        self._release(self._other_end(action), self._order.acknowledged[action])
        if action.kind is ActionKind.RECV_B:
            self._flights[place].gradients = list(arrived)
        else:
            self._deliver(place, self._agreed[stage - 1, self._jobs[index].shapes][0], arrived)


@dataclass(frozen=True)
class _RowOrder:
    """Row of a rank without the micro-batches that do not run, and what follows from the table for it."""

    row: Sequence[Action]
    starts: Mapping[Action, Sequence[Action]]
    """Receives to start before an action (`receive_starts`)."""
    acknowledged: Mapping[Action, int]
    """For each receive, how many messages of this rank the sender has received before it sends."""
    adjacent: frozenset[Place]
    """Stages and micro-batches of an I that its own W follows."""


@lru_cache(maxsize=32)
def _row_order(schedule: Schedule, microbatches: frozenset[int], *, rank: int) -> _RowOrder:
    rows = [[one for one in row if one.microbatch is None or one.microbatch in microbatches] for row in schedule.rows]
    acknowledged: dict[Action, int] = {}
    for row in rows:
        received = 0
        for action in row:
            if action.kind in RECEIVES | SENDS and schedule.other_end(action) == rank:
                received += action.kind in RECEIVES
                if action.kind in SENDS:
                    acknowledged[action.counterpart] = received
    computed = [action for action in rows[rank] if action.kind in COMPUTE]
    adjacent = {_place(one) for one, next_ in pairwise(computed) if next_ == one._replace(kind=ActionKind.W)}
    starts = receive_starts(Schedule(tuple(map(tuple, rows))))
    return _RowOrder(rows[rank], starts, acknowledged, frozenset(adjacent))


def _place(action: Action) -> Place:
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _description(skeleton: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each name the shapes, dtypes, numbers and gradients on which sender and receiver must agree."""
    number = {id(spec): place for place, spec in enumerate(tensor_specs(skeleton))}
    return {
        name: (signature(value, other=pickle.dumps), [(number[id(one)], one.requires_grad) for one in tensors(value)])
        for name, value in skeleton.items()
    }


def _as_text(value: Any) -> str:
    return " ".join(repr(value).split()).replace("..., device='meta', ", "")


def pack(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Split named trees of values into a skeleton and tensors; the tensors stay part of their autograd graph.

    The skeleton has a meta tensor of the same `requires_grad` in place of each tensor; it can be pickled. Each tensor
    is returned once, in the order of first occurrence in the skeleton."""
    parts = tensor_specs(values)
    bare = [torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad) for x in parts]
    return unpack(values, arrived=bare), parts


def tensor_specs(skeleton: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return each tensor of a skeleton, or of values, once; one with `requires_grad` gets a gradient back."""
    return tuple({id(tensor): tensor for tensor in tensors(dict(skeleton))}.values())


def unpack(skeleton: Mapping[str, Any], *, arrived: Sequence[Tensor]) -> dict[str, Any]:
    """Return the values of a skeleton, filled with the `arrived` tensors in the order of `tensor_specs(skeleton)`."""
    places = {id(spec): tensor for spec, tensor in zip(tensor_specs(skeleton), arrived, strict=True)}
    unpacked: dict[str, Any] = map_tensors(lambda spec: places[id(spec)], dict(skeleton))
    return unpacked
