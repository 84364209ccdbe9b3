"""Test ranks that share memory: `World.empty`, ranks at different calls, and machines without shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from joined_worlds import joined
from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run as run_processes
from meshwise.comm.network import job_store as store_module
from meshwise.comm.network.choose_world import Comm, process_world
from meshwise.comm.network.gloo_world import GlooWorld
from meshwise.comm.network.job_store import job_store
from meshwise.comm.shared_memory.group_queue import RECORDS_PER_QUEUE
from meshwise.comm.shared_memory.host_connection import Board
from meshwise.comm.shared_memory.local_world import LocalWorld
from meshwise.comm.shared_memory.shared_segment import SharedSegment, TensorSlabs, open_segment
from meshwise.testing import run
from warm_command import WarmCommand
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 4
LENGTHS = (5, 40_000, (1 << 18) + 3)


def drawn(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def in_shared_memory(world: World, values: Tensor) -> Tensor:
    return world.empty(values.numel(), dtype=values.dtype).copy_(values)


def the_same_bits_wherever_tensors_lie(world: World) -> None:
    """Some ranks bring shared memory, some their own, some slices from the middle of either."""
    for length in LENGTHS:
        everyone = [drawn(rank, world.size * length) for rank in range(world.size)]
        expected = ((everyone[0] + everyone[1]) + everyone[2]) + everyone[3]
        mine = everyone[world.rank]
        own, shared = mine.clone(), in_shared_memory(world, mine)
        middle = in_shared_memory(world, torch.cat([mine[:7], mine]))[7:]
        for x in (shared, own if world.rank % 2 else shared, middle if world.rank < 2 else own):
            part = slice(world.rank * length, (world.rank + 1) * length)
            x.copy_(mine)
            into = torch.empty(length)
            world.reduce_scatter(x, into=into, axes="rank").wait()
            assert into.equal(expected[part])
            assert x.equal(mine)
            world.all_reduce(x, axes="rank").wait()
            assert x.equal(expected)
            x[part] *= world.rank + 1
            world.all_gather(x[part], into=x, axes="rank").wait()
            assert x.equal(torch.cat([expected.split(length)[rank] * (rank + 1) for rank in range(world.size)]))


def the_same_bits_as_by_messages(world: World, name: str) -> None:
    """Both add in the order of the group, whatever the size and the groups."""
    view, gloo = (either.over(Mesh.of(a=2, b=2)) for either in (world, joined(world, name, "gloo")))
    axes: str | tuple[str, ...]
    for axes in ("a", "b", ("a", "b")):
        for length in LENGTHS:
            x = torch.randn(length, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
            here, there = x.clone(), x.clone()
            view.all_reduce(here, axes=axes).wait()
            gloo.all_reduce(there, axes=axes).wait()
            assert here.equal(there)
            whole = x.repeat(view.group(axes).size)
            view.reduce_scatter(whole, into=here, axes=axes).wait()
            gloo.reduce_scatter(whole, into=there, axes=axes).wait()
            assert here.equal(there)
    gloo.close()


def cost_of_waiting(world: World) -> tuple[float, float]:
    """Seconds of processor time, and how often it fell asleep, for each second that rank 0 keeps the others waiting."""
    world.barrier()
    with mock.patch.object(Board, "sleep", autospec=True, side_effect=Board.sleep) as sleep:
        before, since = time.process_time(), time.monotonic()
        if world.rank == 0:
            time.sleep(0.5)
        world.barrier()
        waited = max(0.5, time.monotonic() - since)
    return (time.process_time() - before) / waited, sleep.call_count / waited


def one_runs_ahead(world: World) -> None:
    """Rank 0 starts more than anyone keeps in mind before the others begin; all get what they should."""
    if world.rank:
        time.sleep(0.3)
    count = RECORDS_PER_QUEUE + 20
    sums = [torch.full((3,), float(world.rank + index)) for index in range(count)]
    works = [world.all_reduce(x, axes="rank") for x in sums]
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = [torch.full((2,), float(10 * world.rank + index)) for index in range(count)]
    sends = [world.send(x, axis="rank", to=to) for x in sent] if world.rank == 0 else []
    for index, (work, x) in enumerate(zip(works, sums, strict=True)):
        work.wait()
        assert x.tolist() == [6.0 + 4 * index] * 3
    for index in range(count if world.rank == 1 else 0):
        x = torch.empty(2)
        world.recv(x, axis="rank", source=source).wait()
        assert x.tolist() == [float(index)] * 2
    for work in sends:
        work.wait()


def waits_crosswise(world: World) -> None:
    """Along a, ranks wait for each other in one queue while the call that the other needs stands in another queue."""
    view = world.over(Mesh.of(a=2, b=2))
    first, second = in_shared_memory(world, drawn(0, 5000)), in_shared_memory(world, drawn(1, 5000))
    along_a = view.all_reduce(first, axes="a")
    along_b = view.all_reduce(second, axes="b")
    for work in (along_a, along_b) if world.rank in (0, 3) else (along_b, along_a):
        work.wait()
    assert first.equal(2 * drawn(0, 5000))
    assert second.equal(2 * drawn(1, 5000))


def parts_are_done_without_waiting(world: World) -> None:
    """Ranks that go on computing after a call, and come by now and then."""
    x = in_shared_memory(world, drawn(0, 50_000))
    work, end = world.all_reduce(x, axes="rank"), time.monotonic() + 100.0
    while not work.ready and time.monotonic() < end:
        time.sleep(0.001)
        world.progress()
    assert work.ready
    assert x.equal(4 * drawn(0, 50_000))


def memory_comes_back(world: World) -> list[int]:
    """Shared bytes of this process after some rounds of tensors that come, are reduced and go."""
    found = []
    for _ in range(4):
        tensors = [world.empty(1 << 20, dtype=torch.float32).fill_(1.0) for _ in range(6)]
        for x in tensors:
            world.all_reduce(x, axes="rank").wait()
        del tensors, x
        gc.collect()
        world.barrier()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("Pss_Shmem:")).split()[1]) * 1024)
        world.barrier()
    return found


def without_memory_to_share(world: World, name: str) -> str:
    """A rank whose system refuses is no harm: all use messages, and one says so."""
    found = job_store()
    assert found is not None
    refusing = mock.patch.object(Board, "make", side_effect=OSError("no memfd here"))
    with mock.patch("sys.stderr") as stderr:
        with refusing if world.rank == 1 else mock.patch("sys.stdout"):
            other = process_world(world.device, store=PrefixStore(name, found))
        told = "".join(call.args[0] for call in stderr.write.call_args_list)
    assert isinstance(other, GlooWorld)
    x = torch.ones(3)
    other.all_reduce(x, axes="rank").wait()
    assert x.tolist() == [4.0] * 3
    other.close()
    return told


def borrowed_at_every_size(world: World, name: str) -> None:
    """Parts whose places take more room than they do; and tensors when no more memory is lent to keep."""
    other = joined(world, name, "shared memory")
    lengths = (16_377, 16_377, 16_377, 16_400)  # each at an offset that 16 divides: together they are no payload
    parts = [torch.full((length,), world.rank + 1, dtype=torch.uint8) for length in lengths]
    into = torch.empty(lengths[world.rank], dtype=torch.uint8)
    other.reduce_scatter(parts, into=into, axes="rank").wait()
    assert into.unique().tolist() == [10]
    dtypes = (torch.uint8, torch.float64, torch.float16, torch.int64)
    mixed = [torch.full((5_001,), 10 * world.rank + part, dtype=dtype) for part, dtype in enumerate(dtypes)]
    received = [torch.zeros(5_001, dtype=dtypes[world.rank]) for _ in dtypes]
    other.all_to_all(mixed, into=received, axes="rank").wait()
    assert [x.unique().tolist() for x in received] == [[10 * rank + world.rank] for rank in range(4)]
    held = [other.empty(20_000, dtype=torch.float32) for _ in range(260)]
    x = torch.full((20_000,), float(world.rank))
    other.all_reduce(x, axes="rank").wait()
    assert x.unique().tolist() == [6.0]
    other.all_reduce(held[-1].fill_(world.rank), axes="rank").wait()
    assert held[-1].unique().tolist() == [6.0]
    other.close()


def left_open(world: World, name: str) -> int:
    """How many memories and processes more than before are open when another world was joined and closed."""
    gc.collect()  # what jobs of the same processes before have let go of
    before = open_files()
    other = joined(world, name, "shared memory")
    for _ in range(3):
        other.all_reduce(other.empty(20_000, dtype=torch.float32).fill_(1), axes="rank").wait()
    held = other.empty(20_000, dtype=torch.float32)
    assert open_files() > before
    other.close()
    del held
    return open_files() - before


def open_files() -> int:
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the one that the listing itself had open
            count += entry.readlink().name.startswith("memfd:meshwise-")
    return count


def must_share(world: World, name: str) -> str:
    found = job_store()
    assert found is not None
    with (
        mock.patch.object(store_module, "host_identity", return_value=str(world.rank)),
        pytest.raises(ValueError, match="comm=local, but the ranks cannot share memory: they are on sev") as caught,
    ):
        process_world(world.device, store=PrefixStore(name, found), comm="local")
    return str(caught.value)


def wanted_otherwise(world: World, name: str, last: Comm) -> str:
    """Of the last rank; the others want `auto`."""
    found = job_store()
    assert found is not None
    found.set_timeout(timedelta(seconds=100))
    comm: Comm = "auto" if world.rank < SIZE - 1 else last
    with pytest.raises(ValueError, match="all ranks of a world need one comm") as caught:
        process_world(world.device, store=PrefixStore(name, found), comm=comm)
    return str(caught.value)


def is_local(world: World) -> bool:
    return isinstance(world, LocalWorld)


def test_ranks_of_one_machine_share_memory_by_default(processes: Processes) -> None:
    assert all(run(SIZE, is_local, on=processes))


def test_sums_have_the_same_bits_wherever_tensors_lie(processes: Processes) -> None:
    run(SIZE, the_same_bits_wherever_tensors_lie, on=processes)


def test_sums_have_the_bits_of_messages(processes: Processes) -> None:
    run(SIZE, the_same_bits_as_by_messages, on=processes, args=(uuid.uuid4().hex,))


def test_nobody_burns_a_core_while_one_is_late(processes: Processes) -> None:
    seconds, naps = map(max, zip(*run(SIZE, cost_of_waiting, on=processes), strict=True))
    assert seconds < 0.3
    assert naps < 300, "the bell of the one that is late wakes them"


def test_a_rank_may_run_ahead_of_the_others(processes: Processes) -> None:
    run(SIZE, one_runs_ahead, on=processes)


def test_a_rank_that_comes_by_does_its_part_before_it_waits(processes: Processes) -> None:
    run(SIZE, parts_are_done_without_waiting, on=processes)


def test_queues_do_not_wait_for_each_other(processes: Processes) -> None:
    run(SIZE, waits_crosswise, on=processes)


def test_memory_of_tensors_that_are_gone_is_given_back(processes: Processes) -> None:
    for found in run(SIZE, memory_comes_back, on=processes):
        assert max(found[2:]) <= found[1] + (4 << 20)  # the first round has no memory of an earlier one to keep
        assert found[-1] <= 40 << 20


def test_where_memory_cannot_be_shared_messages_are_used_and_one_rank_says_so(processes: Processes) -> None:
    told = run(SIZE, without_memory_to_share, on=processes, args=(uuid.uuid4().hex,))
    assert "(rank 1: no memfd here)" in told[0]
    assert "MESHWISE_COMM=gloo" in told[0]
    assert told[1:] == [""] * 3


def test_what_others_cannot_read_is_copied_to_where_they_can(processes: Processes) -> None:
    run(SIZE, borrowed_at_every_size, on=processes, args=(uuid.uuid4().hex,))


def test_nothing_is_left_open_of_a_world_that_was_closed(processes: Processes) -> None:
    assert max(run(SIZE, left_open, on=processes, args=(uuid.uuid4().hex,))) <= 0


def test_sharing_can_be_insisted_on(processes: Processes) -> None:
    run(SIZE, must_share, on=processes, args=(uuid.uuid4().hex,))


@pytest.mark.parametrize("last", ["gloo", "local"])
def test_ranks_with_different_comm_get_an_error(processes: Processes, last: Comm) -> None:
    [said] = set(run(SIZE, wanted_otherwise, on=processes, args=(uuid.uuid4().hex, last)))
    assert "comm is auto on rank 2 and" in said
    assert f"{last} on rank 3; set MESHWISE_COMM to one value" in said


def broadcasts_from_elsewhere(world: World, elements: int) -> None:
    x = torch.full((elements,), float(world.rank))
    world.broadcast(x, axes="rank", source=1 if world.rank == 1 else 0).wait()
    world.barrier()


@pytest.mark.parametrize("elements", [5, 40_000])
def test_a_rank_that_nobody_needed_when_it_called_something_else_is_found(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWISE_STALL_SECONDS", "10")
    with pytest.raises(RanksDisagree, match=rf"rank 1 +#0 broadcast\[rank\] from 1 {elements} float32"):
        run_processes(3, broadcasts_from_elsewhere, args=(elements,), comm="local")


def test_what_is_announced_is_what_is_mapped() -> None:
    segment = SharedSegment.make(5, size=8192)
    other = open_segment(os.getpid(), place=segment.place)
    segment.memory[3] = 7
    assert other[3] == 7
    with pytest.raises(OSError, match="is not the segment meshwise-"):
        open_segment(os.getpid(), place=segment.place + (1 << 20))


MAKER = """
import signal
from meshwise.comm.shared_memory.shared_segment import SharedSegment
segment = SharedSegment.make(5, size=8192)
segment.memory[3] = 7
print(segment.place, flush=True)
signal.pause()
"""


def test_nothing_is_left_of_the_memory_of_a_killed_process() -> None:
    """It has no name that could outlive it; who has mapped it keeps what was mapped."""
    named = set(Path("/dev/shm").iterdir())
    maker = WarmCommand("-c", MAKER)
    place = int(maker.stdout.readline())
    memory = open_segment(maker.pid, place=place)
    found = set(Path("/dev/shm").glob("*meshwise*")) - set(Path("/dev/shm").glob("sem.*"))  # jobs beside this one
    assert found <= named
    maker.kill()
    assert memory[3] == 7
    with pytest.raises(OSError, match="is not the segment meshwise-"):
        open_segment(maker.pid, place=place)


def test_a_slab_is_lent_again_when_its_last_view_is_gone() -> None:
    slabs = TensorSlabs()
    x = slabs.empty(100, dtype=torch.float64)
    place = slabs.locate(x)
    assert slabs.locate(x[5:]) == (place[0], 40) if place else False
    assert slabs.locate(torch.empty(3)) is None
    view = x[50:].view(torch.int64)
    del x
    other = slabs.empty(100, dtype=torch.float64)
    assert slabs.locate(other) != place, "a view is still there"
    del view
    assert slabs.locate(slabs.empty(100, dtype=torch.float64)) == place


def test_very_many_tensors_do_not_use_up_the_file_descriptors() -> None:
    slabs = TensorSlabs()
    held = [slabs.empty(1, dtype=torch.float64) for _ in range(300)]
    shared = [x for x in held if slabs.locate(x) is not None]
    assert len(shared) == 256
    del held, shared
    assert slabs.locate(slabs.empty(1, dtype=torch.float64)) is not None
