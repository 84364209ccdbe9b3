"""Test that simulated accelerators catch each wait, event, record, `keep` and pinning that is taken out of the code.

A fault is one line of a method that is replaced. The training under the plan then has to fail, with the message of the
fault: the race that the missing line prevents, memory that is not pinned, or ranks that wait for each other."""

from __future__ import annotations

import gc
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerator.queued_work import Deadlock
from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.stream_races import StreamRace
from accelerator.training import check_losses, detaching
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.comm.network import gloo_world
from meshwise.comm.network.gloo_world import PendingMessages
from meshwise.testing import run

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A run that fails leaves its swap file open; `_collected` collects it before the tests of other files."""

CAUGHT = (StreamRace, Deadlock, RuntimeError)


@dataclass(frozen=True)
class Fault:
    """Line of a function (`module:Class.method`) and what replaces it; the plan that fails, and the failure's text."""

    place: str
    line: str
    plan: str
    message: str
    instead: str = "pass"
    model: Callable[[], nn.Module] | None = None
    """None: the model of `training.model_of`."""
    waits_at_launch: bool = False


HOST, DISK, TIERS = (
    "memory.activation_offload:HostMover.park",
    "memory.activation_offload:DiskMover.park",
    "memory.tiers:Tiers",
)
COPY = "comm.api.streams:Streams.copy_on"
STATE = "dp=2 zero=2 microbatches=2 offload=gradients:cpu,optimizer:cpu"
PARAMETERS = "dp=2 zero=3 microbatches=2 offload=params:cpu,optimizer:cpu"
ON_DISK = "dp=2 zero=3 offload=params:disk"
ACTIVATIONS, SAVED = "dp=2 offload=activations:cpu", "dp=2 offload=activations:disk"
STAGES = "pp=2 microbatches=2"
UNWRITTEN, UNREAD = "memory that .* may not have written yet", "memory that .* may not have read yet"
FREED, UNPINNED = "freed while a stream may use", "asynchronous copy on stream .* of memory that is not pinned"

FAULTS = (
    Fault(COPY, "stream.wait_stream(self.current())", STATE, UNWRITTEN),
    Fault(COPY, "self.keep(values, stream=stream)", ACTIVATIONS, FREED),
    # state on the CPU
    Fault(f"{TIERS}.settle", "self._out.synchronize()", STATE, UNWRITTEN),
    Fault(
        f"{TIERS}.settle",
        "self._in.synchronize()",
        "dp=2 zero=3 offload=params:cpu,optimizer:cpu",
        f"the host writes {UNREAD}",
        model=detaching,
    ),
    Fault(f"{TIERS}._join", "current.wait_event(copied)", PARAMETERS, UNWRITTEN),
    Fault(f"{TIERS}._join", "self._streams.keep(values, stream=current)", PARAMETERS, FREED),
    Fault(
        "memory.swap_file:PinnedSlabs.cut",
        "self._rest = self._streams.host_empty([max(SLAB, 1 << (room - 1).bit_length())], dtype=torch.uint8)",
        PARAMETERS,
        UNPINNED,
        "self._rest = torch.empty([max(SLAB, room)], dtype=torch.uint8)",
    ),
    # state on disk
    Fault(f"{TIERS}._read", "transfer.wait()", ON_DISK, "reads memory that the disk may not have written yet"),
    Fault(f"{TIERS}._read", "copied.synchronize()", ON_DISK, f"the host writes {UNREAD}"),
    Fault(f"{TIERS}._read", "copied.record(self._streams.current())", ON_DISK, f"the host writes {UNREAD}"),
    Fault(
        f"{TIERS}.store",
        "after=copied.synchronize",
        "dp=2 zero=2 microbatches=2 offload=gradients:disk,optimizer:disk",
        f"the disk reads {UNWRITTEN}",
        "after=lambda: None",
    ),
    Fault(
        "memory.chunked_update:StagedRound.bind_values",
        "read.wait()",
        "dp=2 zero=1 offload=optimizer:disk",
        "the host reads memory that the disk may not have written yet",
    ),
    # activations
    Fault(
        HOST, "host = self._pinned.cut(size)", ACTIVATIONS, UNPINNED, "host = torch.empty([size], dtype=torch.uint8)"
    ),
    Fault(HOST, "self.back.wait_event(copied)", ACTIVATIONS, UNWRITTEN),
    Fault(HOST, "arrived.record(self.back)", ACTIVATIONS, UNWRITTEN),
    Fault(HOST, "current.wait_event(arrived)", ACTIVATIONS, UNWRITTEN),
    Fault(HOST, "self.streams.keep(back, stream=current)", ACTIVATIONS, FREED),
    Fault(DISK, "after=copied.synchronize", SAVED, f"the disk reads {UNWRITTEN}", "after=lambda: None"),
    Fault(DISK, "transfers[-1].wait()", SAVED, "reads memory that the disk may not have written yet"),
    # replicas
    Fault("comm.network.nccl_world:NcclWorld._started", "complete()", "dp=2", UNWRITTEN),
    Fault("data_parallel.bucket:Bucket.settle", "arriving.work.wait()", "dp=2 zero=1 precision=bf16", UNWRITTEN),
    Fault("data_parallel.bucket:Bucket.settle_replicas", "between.work.wait()", "dp=2x2 zero=2", UNWRITTEN),
    Fault(
        "data_parallel.live_unit:LiveUnit.ready", "wait_all(self._gathering)", "dp=2 zero=3 recompute=full", UNWRITTEN
    ),
    Fault(
        "data_parallel.live_unit:LiveUnit.receive_update",
        "wait_all(works)",
        "dp=2 zero=1",
        "may not have (written|read) yet",
    ),
    # layers, tokens and experts
    Fault("comm.api.autograd_collectives:after", "work.wait()", "tp=2 sequence_parallel=1 precision=bf16", UNWRITTEN),
    Fault(
        "attention.kv_exchange:RingExchange.blocks", "wait_all(works)", "cp=2 context=ring recompute=full", UNWRITTEN
    ),
    Fault("attention.kv_exchange:DirectExchange.backward", "wait_all(works)", "cp=2 context=window", UNWRITTEN),
    Fault(
        "expert.token_exchange:ExpertExchange._exchange_counts",
        "work.wait()",
        "dp=2 ep=2",
        UNWRITTEN,
        "",
    ),
    # stages
    Fault("pipeline.run.schedule_interpreter:_ScheduleRun._receive", "wait_all(works)", STAGES, UNWRITTEN),
    Fault(
        "pipeline.run.schedule_interpreter:_ScheduleRun._release",
        "wait_all(self._sending[rank].popleft())",
        STAGES,
        FREED,
    ),
    Fault("data_parallel.stage_engines:Engine.sum_ties", "wait_all(works)", STAGES, f"{UNREAD}|{FREED}"),
    Fault(
        "pipeline.run.schedule_interpreter:_row_order",
        "receive_starts(Schedule(tuple(map(tuple, rows))))",
        "pp=2 microbatches=4 schedule=looped virtual_stages=2",
        "every rank waits for another",
        "{}",
        waits_at_launch=True,
    ),
    Fault(
        "comm.network.nccl_world:NcclWorld.prepare",
        "new = sorted(key for key in keys if key not in self._communicators.made)",
        "dp=4 sync=gossip every=1",
        "every rank waits for another",
        "new = []",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the line of a fault in the class or module for the time of the test."""
    file, _, path = fault.place.partition(":")
    module = importlib.import_module(f"meshwise.{file}")
    owner, _, name = path.rpartition(".")
    holder = vars(module)[owner] if owner else module
    source = textwrap.dedent(inspect.getsource(vars(holder)[name]))
    assert fault.line in source, f"{fault.place} has no line {fault.line!r} any more"
    made: dict[str, Any] = {}
    exec(compile(source.replace(fault.line, fault.instead), fault.place, "exec"), vars(module), made)
    monkeypatch.setattr(holder, name, made[name])


def test_the_faults_are_distinct_lines_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({(fault.place, fault.line) for fault in FAULTS}) == len(FAULTS) >= 25
    for fault in FAULTS:
        with monkeypatch.context() as patched:
            plant(fault, patched)


KINDS = {fault.message: number for number, fault in reversed([*enumerate(FAULTS)])}
"""The first fault with each message, by its number; another may be caught as a race of the same kind."""


@pytest.mark.grid(Grid({"number": range(len(FAULTS))}, heavy=lambda cell: cell["number"] not in KINDS.values()))
def test_a_planted_fault_is_caught(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[number]
    plant(fault, monkeypatch)
    on = SimulatedAccelerators(waits_at_launch=fault.waits_at_launch)
    with pytest.raises(CAUGHT) as caught:
        check_losses(fault.plan, on=on, model=fault.model)
    assert re.search(fault.message, str(caught.value)), str(caught.value)
    if isinstance(caught.value, StreamRace):
        assert re.search(r"first: .* at .*:\d+ ", str(caught.value))


# ---- ranks that share a GPU: copies through pinned memory ---------------------------------------------------------


def doubled(world: World) -> Tensor:
    """Double a tensor in a thread, on pinned copies, as `GlooWorld` does with the tensors of a collective."""
    worker = gloo_world.WorkerThread("test")
    x = torch.ones(1000, device=world.device)
    x += 1

    def program(reads: list[Tensor], writes: list[Tensor]) -> Any:
        writes[0].copy_(reads[0] * 2)
        yield PendingMessages([], "")

    finish: Callable[[], None] = gloo_world._staged(world.streams, program, [x], [x], worker=worker)
    other = world.streams.create()
    with world.streams.use(other):
        finish()
    world.streams.current().wait_stream(other)
    worker.close()
    return x.cpu()


def test_a_staged_collective_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(1, doubled, on=SimulatedAccelerators())[0].eq(4).all()
    source, made = inspect.getsource(gloo_world._staged), dict[str, Any]()
    assert "copied.synchronize()" in source
    exec(source.replace("copied.synchronize()", "pass"), vars(gloo_world), made)
    monkeypatch.setattr(gloo_world, "_staged", made["_staged"])
    with pytest.raises(StreamRace, match="writes memory that the default stream may not have written yet"):
        run(1, doubled, on=SimulatedAccelerators())
