"""Test that simulated accelerators catch each wait, event, record, `keep` and pinning that is taken out of the code.

A fault is one line of a method that is replaced. The training under the plan then has to fail, with the message of the
fault: the race that the missing line prevents, or the numbers that are wrong without it."""

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
from torch import Tensor

from accelerator.queued_work import Deadlock
from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.stream_races import StreamRace
from accelerator.training import check_losses
from meshwise.comm.api.world import World
from meshwise.comm.network import gloo_world
from meshwise.comm.network.gloo_world import PendingMessages
from meshwise.testing import Disagreement, run

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A run that fails leaves its swap file open; `_collected` collects it before the tests of other files."""

CAUGHT = (StreamRace, Deadlock, Disagreement, RuntimeError)


@dataclass(frozen=True)
class Fault:
    """A line of a method (`module:Class.method`) and what replaces it; the plan that fails, and the failure's text."""

    place: str
    line: str
    plan: str
    message: str
    instead: str = "pass"


HOST, TIERS = "memory.activation_offload:HostMover", "memory.tiers:Tiers"
COPY = "comm.api.streams:Streams.copy_on"
STATE = "dp=2 zero=2 microbatches=2 offload=gradients:cpu,optimizer:cpu"
PARAMETERS = "dp=2 zero=3 microbatches=2 offload=params:cpu,optimizer:cpu"
ACTIVATIONS = "dp=2 offload=activations:cpu"
STAGES = "pp=2 microbatches=2"

FAULTS = (
    Fault(COPY, "stream.wait_stream(self.current())", STATE, "reads memory .* written yet"),
    Fault(COPY, "self.keep(values, stream=stream)", STATE, "freed while a stream may use"),
    Fault(f"{TIERS}.settle", "self._out.synchronize()", STATE, "memory that stream .* may not have written yet"),
    Fault(f"{TIERS}._join", "current.wait_event(copied)", PARAMETERS, "memory that stream .* may not have written yet"),
    Fault(f"{TIERS}._join", "self._streams.keep(values, stream=current)", PARAMETERS, "freed while a stream may use"),
    Fault(
        "memory.swap_file:PinnedSlabs.cut",
        "self._rest = self._streams.host_empty([max(SLAB, 1 << (room - 1).bit_length())], dtype=torch.uint8)",
        PARAMETERS,
        "asynchronous copy on stream .* of memory that is not pinned",
        "self._rest = torch.empty([max(SLAB, room)], dtype=torch.uint8)",
    ),
    Fault(COPY, "stream.wait_stream(self.current())", ACTIVATIONS, "reads memory .* written yet"),
    Fault(COPY, "self.keep(values, stream=stream)", ACTIVATIONS, "freed while a stream may use"),
    Fault(
        f"{HOST}.park",
        "host = self._pinned.cut(size)",
        ACTIVATIONS,
        "asynchronous copy on stream .* of memory that is not pinned",
        "host = torch.empty([size], dtype=torch.uint8)",
    ),
    Fault(
        f"{HOST}.park",
        "self.back.wait_event(copied)",
        ACTIVATIONS,
        "reads memory .* written yet",
    ),
    Fault(
        f"{HOST}.park",
        "arrived.record(self.back)",
        ACTIVATIONS,
        "memory that stream .* may not have written yet",
    ),
    Fault(
        f"{HOST}.park",
        "current.wait_event(arrived)",
        ACTIVATIONS,
        "memory that stream .* may not have written yet",
    ),
    Fault(
        f"{HOST}.park",
        "self.streams.keep(back, stream=current)",
        ACTIVATIONS,
        "freed while a stream may use",
    ),
    Fault(COPY, "stream.wait_stream(self.current())", "dp=2 offload=activations:disk", "reads memory .* written yet"),
    Fault(COPY, "self.keep(values, stream=stream)", "dp=2 offload=activations:disk", "freed while a stream may use"),
    Fault(
        "memory.activation_offload:DiskMover.park",
        "written = self.file.write(offset, values=buffer, after=copied.synchronize)",
        "dp=2 offload=activations:disk",
        "relative difference|nan",
        "written = self.file.write(offset, values=buffer)",
    ),
    Fault("comm.network.nccl_world:_Started._finish", "self._complete()", "dp=2", "may not have written yet"),
    Fault("data_parallel.bucket:Bucket.settle", "arriving.work.wait()", "dp=2 zero=1", "may not have written yet"),
    Fault("data_parallel.live_unit:LiveUnit.ready", "work.wait()", "dp=2 zero=3", "may not have written yet"),
    Fault(
        "data_parallel.live_unit:LiveUnit.await_update",
        "work.wait()",
        "dp=2 zero=1",
        "may not have (written|read) yet",
    ),
    Fault(
        "data_parallel.live_unit:LiveUnit.ready",
        "work.wait()",
        "dp=2 zero=1 overlap_gather=1",
        "may not have (written|read) yet",
    ),
    Fault(
        "pipeline.run.schedule_interpreter:_ScheduleRun._receive",
        "work.wait()",
        STAGES,
        "may not have written yet",
    ),
    Fault(
        "pipeline.run.schedule_interpreter:_ScheduleRun._release",
        "work.wait()",
        STAGES,
        "freed while a stream may use",
    ),
    Fault(
        "comm.network.nccl_world:NcclWorld.prepare",
        "new = sorted(key for key in keys if key not in self._communicators.made)",
        STAGES,
        "every rank waits for another",
        "new = []",
    ),
    Fault("data_parallel.staged_engine:Engine._sum_tie", "work.wait()", STAGES, "not have read yet|freed while"),
)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the line of a fault in the class for the time of the test."""
    file, _, path = fault.place.partition(":")
    module = importlib.import_module(f"meshwise.{file}")
    owner, _, name = path.partition(".")
    method = vars(vars(module)[owner])[name]
    source = textwrap.dedent(inspect.getsource(method))
    found = [line for line in source.splitlines() if fault.line in line]
    assert found, f"{fault.place} has no line {fault.line!r} any more"
    made: dict[str, Any] = {}
    exec(compile(source.replace(fault.line, fault.instead), fault.place, "exec"), vars(module), made)
    monkeypatch.setattr(vars(module)[owner], name, made[name])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.place.split(':')[1]}: {fault.line[:40]}")
def test_a_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    with pytest.raises(CAUGHT) as caught:
        check_losses(fault.plan, on=SimulatedAccelerators())
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
