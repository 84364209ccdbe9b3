"""Run the training code on meta tensors for one rank of each kind, and record the tape of each such rank.

Ranks along pp that do the same work are of one kind. The tape has the memory that exists after the plan is applied, and
every operation, call and allocation of two steps (`operation_recorder.py`)."""

import dataclasses
import functools
import math
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.flight_recorder import FlightRecorder
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.memory.activation_offload import RehearsedMover
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import default_forward
from meshwise.model.shape_constants import ShapeConstants
from meshwise.pipeline.schedules.action import Action, ActionKind
from meshwise.pipeline.schedules.validate import in_flight
from meshwise.plan import Plan
from meshwise.plan.plan_keys import Offload
from meshwise.simulate.meta_value_errors import explaining_values, wrap_for_rehearsal
from meshwise.simulate.offload_traffic import microbatch_traffic, update_traffic
from meshwise.simulate.operation_recorder import KernelChoice, OperationMemo, OperationRecorder, Recorder, optimizer_on
from meshwise.simulate.rehearsal_subject import Device, RehearsalSubject
from meshwise.simulate.rehearsal_world import RehearsalWorld, StageMessages
from meshwise.simulate.step_tape import Category, Tape, TapeSegment


@dataclass(frozen=True)
class TapeRecording:
    """Recording of the tapes of a plan's ranks, with the inputs that all ranks share."""

    subject: RehearsalSubject
    plan: Plan
    only: frozenset[int]
    """Micro-batches that run; they stand for the others."""
    source: ParameterSource
    """Model, with parameters on meta."""
    device: Device
    stages: StageMessages
    """Messages between the ranks along pp that are rehearsed."""
    shared: bool
    """True if the ranks are processes of one host and share its memory."""
    values: tuple[tuple[Tensor, Tensor], ...]
    """Pairs of a meta tensor of the batch and its values."""
    memo: OperationMemo = field(default_factory=OperationMemo)

    def tapes(self) -> tuple[Tape, ...]:
        """Rehearse one rank of each kind, each in its own thread, and return the tape of each rank along pp."""
        like = self.stages.rehearsed
        ranks_run = sorted(set(like))
        with ThreadPoolExecutor(len(ranks_run)) as threads:
            futures = {index: threads.submit(self._tape_of, index) for index in ranks_run}
        failures = [failure for failure in (future.exception() for future in futures.values()) if failure is not None]
        for failure in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            with explaining_values():
                raise failure
        return tuple(futures[index].result() for index in like)

    def _tape_of(self, index: int) -> Tape:
        """Return the tape of the first rank with this index along pp."""
        with self.stages.running():
            return self._tape(index)

    def _tape(self, index: int) -> Tape:
        mesh = self.plan.mesh()
        rank = index * (mesh.size // self.plan.pp)
        recorder = Recorder(FlightRecorder())
        world = RehearsalWorld(rank=rank, mesh=mesh, recorder=recorder, stages=self.stages, shared=self.shared)
        constants, options = ShapeConstants(self.values), self.subject.options
        forward = wrap_for_rehearsal(options.forward or default_forward, constants=constants)
        with KernelChoice(self.device, local=self.plan.random == "local"):
            with constants:
                trainer = parallelize(
                    self.source,
                    _played(self.plan, self.device),
                    loss=wrap_for_rehearsal(self.subject.loss, constants=constants),
                    optimizer=optimizer_on(self.device, optimizer=self.subject.optimizer),
                    world=world,
                    options=dataclasses.replace(options, forward=forward),
                    **self.subject.arguments,
                )
            recorder.segments()
            for tensor in tree.tensors(self.subject.batch):
                recorder.ignore(tensor)  # the batch belongs to the caller, not to the trainer
            _watch(trainer, recorder, on_gpu=self.device == "cuda")
            build = recorder.segments()
            with OperationRecorder(recorder, memo=self.memo), constants:
                trainer.step(self.subject.batch, only=frozenset({max(self.only)}))
                first = self._run(recorder)
                saved = 0 if trainer.activations is None else trainer.activations.mover.peak
                trainer.step(self.subject.batch, only=self.only)
                steady = self._run(recorder)
        tiers, on_gpu = self.plan.tiers, self.device == "cuda"
        sizes = {**trainer.tiers.disk_bytes, "activations": saved}
        return Tape(
            index,
            build[0],
            first,
            steady,
            self._away(trainer, saved=saved),
            microbatch_traffic(tiers, sizes=sizes, microbatches=self.plan.microbatches, on_gpu=on_gpu),
            update_traffic(tiers, sizes=sizes, updated=_updated(trainer), on_gpu=on_gpu),
        )

    def _away(self, trainer: Trainer, *, saved: int) -> Mapping[str, int]:
        """Return the bytes off the device by tier (`cpu`, `disk`). `saved`: offloaded activations per micro-batch."""
        away: Counter[str] = Counter()
        for what, size in trainer.tiers.disk_bytes.items():
            away[getattr(self.plan.tiers, what)] += size
        if saved:
            kept, stages = in_flight(trainer.schedule), trainer.schedule.stages_of(trainer.world.group("pp").index)
            away[self.plan.tiers.activations] += saved * math.ceil(max(kept[stage] for stage in stages))
        if self.device == "cuda":  # staging buffers are pinned memory of the host
            away["cpu"] += trainer.tiers.staged if self.plan.tiers.uses_disk else 0
            away["cpu"] += _staged(trainer) if self.plan.tiers.activations == "disk" else 0
        return +away

    def _run(self, recorder: Recorder) -> tuple[TapeSegment, ...]:
        """Return the segments recorded since the last call, without the forwards of skipped micro-batches."""
        passed = {Action(0, ActionKind.F, index) for index in range(self.plan.microbatches) if index not in self.only}
        return tuple(segment for segment in recorder.segments() if self.plan.pp > 1 or segment.activity not in passed)


def _updated(trainer: Trainer) -> Mapping[str, int]:
    """Return the bytes that a rank updates: of `params`, and of their `gradients` in the dtype of the masters."""
    updated: Counter[str] = Counter()
    for bucket in (bucket for unit in trainer.units for bucket in unit.buckets):
        count = bucket.owned[1] - bucket.owned[0]
        updated["params"] += count * bucket.dtype.itemsize
        updated["gradients"] += count * bucket.shard_group.storage.precision.master_of(bucket.dtype).itemsize
    return updated


def _staged(trainer: Trainer) -> int:
    """Return the bytes of the staging buffers through which activations move."""
    tier = trainer.activations
    return tier.mover.staged if tier is not None and isinstance(tier.mover, RehearsedMover) else 0


def _played(plan: Plan, device: Device) -> Plan:
    """Return the plan to run: for CUDA, `cpu` in its `offload` becomes `disk`, because no rehearsal has a GPU."""
    tiers = {what: "disk" if tier == "cpu" else tier for what, tier in dataclasses.asdict(plan.tiers).items()}
    return plan if device == "cpu" else dataclasses.replace(plan, offload=str(Offload(**tiers)))


def _watch(trainer: Trainer, recorder: Recorder, *, on_gpu: bool) -> None:
    """Count the memory that exists before the first step, and watch storages that grow and shrink in a step."""
    for tensor in trainer.tiers.disk_tensors:
        recorder.ignore(tensor)
    staged = functools.partial(recorder.watch, category=Category.STAGING)
    trainer.tiers.on_new_buffer = recorder.ignore if on_gpu else staged  # staging buffers of a GPU are host memory
    if trainer.activations is not None and isinstance(trainer.activations.mover, RehearsedMover):
        trainer.activations.mover.on_new_buffer = trainer.tiers.on_new_buffer
    for bucket in (bucket for unit in trainer.units for bucket in unit.buckets):
        for name, value in vars(bucket).items():
            if isinstance(value, Tensor) and not trainer.tiers.on_disk(value):
                gathered = bucket.is_sharded and value is bucket.whole
                gradient = name in ("gradient", "reduced")
                usual = Category.GRADIENTS if gradient else Category.PARAMETERS
                note = recorder.watch if value is bucket.whole else recorder.record_allocation
                note(value, category=Category.GATHERED if gathered else usual)
        for state in bucket.reduction_state.values():
            recorder.record_allocation(state, category=Category.REDUCTION)
    for module in trainer.modules:
        for buffer in module.buffers():
            recorder.record_allocation(buffer, category=Category.PARAMETERS)
    for state in trainer.optimizer.state.values():
        for value in tree.tensors(state):
            recorder.record_allocation(value, category=Category.OPTIMIZER)
