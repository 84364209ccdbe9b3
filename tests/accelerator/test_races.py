"""Test that simulated accelerators find each kind of error with streams, and name both uses and the missing wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerator.queued_work import Deadlock
from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.simulated_nccl import SimulatedNccl
from accelerator.simulated_streams import SimulatedStreams
from accelerator.stream_races import StreamRace
from meshwise.comm.api.world import World
from meshwise.testing import run

N = 1000


def alone(main: Callable[[World], Any], **setting: Any) -> Any:
    [result] = run(1, main, on=SimulatedAccelerators(**setting))
    return result


def test_device_tensors_look_like_tensors_of_a_gpu() -> None:
    def main(world: World) -> None:
        x = torch.ones(3, device=world.device)
        host = torch.ones(3)
        assert x.is_cuda
        assert x.device == world.device == torch.device("cuda", 0)
        assert (x * 2).is_cuda
        assert torch.zeros_like(x).is_cuda
        assert x.new_zeros(2).device == world.device
        assert not x.cpu().is_cuda
        assert not host.is_cuda
        assert host.to(x).is_cuda
        assert host.cuda().is_cuda
        assert x.to(world.device) is x
        assert x.to("meta").is_meta
        assert torch.tensor([1.0], device="cuda").is_cuda
        assert torch.empty(2, device="cuda").isnan().all()
        w = torch.ones(3, device=world.device, requires_grad=True)
        (w * x).sum().backward()
        assert w.grad is not None
        assert w.grad.is_cuda
        with pytest.raises(TypeError, match="copy it to the host"):
            x.numpy()
        with pytest.raises(RuntimeError, match="same device, but found cpu and cuda:0"):
            x + host

    alone(main)


def copied_out(world: World, *, wait: bool, keep: bool, pinned: bool = True) -> tuple[Tensor, Tensor]:
    """Copy to the host on a side stream; the source dies before the copy has run."""
    streams = world.streams
    side = streams.create()
    x = torch.full((N,), 3.0, device=world.device)
    host = streams.host_empty([N], dtype=x.dtype) if pinned else torch.empty(N)
    if wait:
        side.wait_stream(streams.current())
    with streams.use(side) as value:
        assert value is None  # as of torch.cuda.stream
        host.copy_(x, non_blocking=True)
    if keep:
        streams.keep(x, stream=side)
    else:
        del x
    early = host.clone() if not wait else torch.empty(0)
    side.synchronize()
    return host.clone(), early


def test_a_copy_on_a_side_stream_waits_for_its_source() -> None:
    assert alone(lambda world: copied_out(world, wait=True, keep=True))[0].eq(3).all()
    with pytest.raises(StreamRace, match="stream 0 reads memory that the default stream may not have written") as found:
        alone(lambda world: copied_out(world, wait=False, keep=True))
    text = str(found.value)
    assert re.search(r"first: +aten.full.default at .*test_races.py:\d+ copied_out, on the default stream", text)
    assert re.search(r"then: +copy_ at accelerator/test_races.py:\d+ copied_out, on stream 0", text)
    assert "missing: a wait of stream 0 for the default stream between them" in text
    assert "float32 [1000]" in text


def test_memory_lives_until_a_side_stream_has_read_it() -> None:
    with pytest.raises(StreamRace, match=r"freed while a stream may use it: float32 .1000.") as found:
        alone(lambda world: copied_out(world, wait=True, keep=False))
    assert "or `streams.keep(tensor, stream=…)` before it is freed" in str(found.value)
    assert alone(lambda world: copied_out(world, wait=True, keep=False), watches=False)[0].isnan().all()


def test_asynchronous_copies_need_pinned_memory() -> None:
    with pytest.raises(RuntimeError, match=r"not pinned: it would block the host; allocate the memory with `streams"):
        alone(lambda world: copied_out(world, wait=True, keep=True, pinned=False))


def test_the_host_waits_before_it_reads_a_copy() -> None:
    def main(world: World, *, wait: bool) -> Tensor:
        x = torch.ones(N, device=world.device)
        host = world.streams.host_empty([N], dtype=x.dtype)
        host.copy_(x, non_blocking=True)
        copied = world.streams.mark()
        if wait:
            copied.synchronize()
        seen = host.clone()
        copied.synchronize()
        return seen

    assert alone(lambda world: main(world, wait=True)).eq(1).all()
    with pytest.raises(StreamRace, match="the host reads memory that the default stream may not have written"):
        alone(lambda world: main(world, wait=False))
    assert alone(lambda world: main(world, wait=False), watches=False).isnan().all()


def test_the_host_waits_before_it_overwrites_what_is_copied() -> None:
    def main(world: World) -> None:
        host = world.streams.host_empty([N], dtype=torch.float32).fill_(1.0)
        side = world.streams.create()
        with world.streams.use(side):
            x = host.to(world.device, non_blocking=True)
        host.fill_(2.0)
        world.streams.keep(x, stream=side)

    with pytest.raises(StreamRace, match="the host writes memory that stream 0 may not have read yet"):
        alone(main)


def test_resized_memory_is_freed_memory() -> None:
    def main(world: World, *, wait: bool) -> None:
        streams = world.streams
        side, x = streams.create(), torch.ones(N, device=world.device)
        side.wait_stream(streams.current())
        host = streams.host_empty([N], dtype=x.dtype)
        with streams.use(side):
            host.copy_(x, non_blocking=True)
        if wait:
            streams.current().wait_stream(side)
        streams.resize(x, size=0)
        streams.resize(x, size=4 * N)
        assert x.isnan().all()

    alone(lambda world: main(world, wait=True))
    with pytest.raises(StreamRace, match="memory is freed while a stream may use it"):
        alone(lambda world: main(world, wait=False))


def test_parts_of_one_storage_do_not_race() -> None:
    def main(world: World) -> Tensor:
        streams = world.streams
        side, x = streams.create(), torch.zeros(N, device=world.device)
        side.wait_stream(streams.current())
        host = streams.host_empty([N // 2], dtype=x.dtype).fill_(1.0)
        with streams.use(side):
            x[: N // 2].copy_(host, non_blocking=True)
        x[N // 2 :] += 2
        streams.current().wait_stream(side)
        return x.sum().cpu()

    assert alone(main).item() == 1.5 * N


def test_an_event_belongs_to_the_device_of_its_stream() -> None:
    def main(world: World) -> None:
        world.streams.host.select(0)  # type: ignore[attr-defined] # as in a thread that has selected no device
        if world.rank == 1:
            with pytest.raises(RuntimeError, match="an event of device cuda:1 is recorded on a stream of cuda:0"):
                world.streams.event().record()

    run(2, main, on=SimulatedAccelerators())


def urgent_stream(world: World) -> object:
    """Return a stream of the pool from which messages have theirs."""
    return vars(type(world.streams))["create"](world.streams, urgent=True)


def test_a_pool_gives_its_streams_again() -> None:
    def main(world: World) -> None:
        first = world.streams.create()
        others = [world.streams.create() for _ in range(31)]
        assert first not in others
        assert world.streams.create() is first
        assert urgent_stream(world) is not first

    alone(main)


def test_a_collective_owns_its_tensors_until_wait() -> None:
    def main(world: World) -> None:
        x = torch.ones(N, device=world.device)
        work = world.all_reduce(x, axes="rank")
        x += 1
        work.wait()

    with pytest.raises(StreamRace, match=r"first:  all_reduce sum of 1000 torch.float32 at accelerator/test_races.py"):
        run(2, main, on=SimulatedAccelerators())


def test_work_waited_for_on_another_stream_keeps_its_tensors() -> None:
    def main(world: World) -> Tensor:
        other = world.streams.create()
        x = torch.ones(N, device=world.device)
        work = world.all_reduce(x, axes="rank")
        with world.streams.use(other):
            work.wait()
            total = x.sum()
        del x, work
        world.streams.current().wait_stream(other)
        return total.cpu()

    assert [total.item() for total in run(2, main, on=SimulatedAccelerators())] == [2 * N, 2 * N]


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    def main(world: World) -> None:
        x = torch.ones(N, device=world.device)
        world.prepare(lines=[(0, 1), (1, 0)])
        world.recv(x, axis="rank", source=1 - world.rank).wait()

    with pytest.raises(Deadlock, match="every rank waits for another") as found:
        run(2, main, on=SimulatedAccelerators())
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} waits for \[{1 - rank}\] in recv from {1 - rank} of 1000 .*test_races.py:\d+ main",
            str(found.value),
        )


def test_calls_in_different_orders_on_one_stream_are_a_deadlock() -> None:
    """The 33rd stream is the first one again, and each rank has its two messages there in another order."""

    def main(world: World) -> None:
        out, back = torch.ones(N, device=world.device), torch.ones(N, device=world.device)
        world.prepare(lines=[(0, 1)])
        for _ in range(31):
            urgent_stream(world)
        world.prepare(lines=[(1, 0)])
        other = 1 - world.rank
        works = [world.send(out, axis="rank", to=other), world.recv(back, axis="rank", source=other)]
        for work in works:
            work.wait()

    with pytest.raises(Deadlock, match="wait for each other in a circle") as found:
        run(2, main, on=SimulatedAccelerators())
    assert "send to 1" in str(found.value)
    assert "send to 0" in str(found.value)


def test_nccl_refuses_what_it_cannot_send() -> None:
    def main(world: World, dtype: torch.dtype) -> None:
        world.all_reduce(torch.ones(3, dtype=dtype, device=world.device), axes="rank").wait()

    with pytest.raises(RuntimeError, match=r"NCCL cannot send torch\.int16"):
        run(2, main, on=SimulatedAccelerators(), args=(torch.int16,))


def test_two_ranks_on_one_device_are_refused() -> None:
    made: dict[str, SimulatedNccl] = {}

    def main(world: World) -> None:
        first: SimulatedStreams = world.streams.host.devices[0]  # type: ignore[attr-defined]
        nccl = made.setdefault("", SimulatedNccl(first.queues))
        nccl.backend(first)("", (0, 1), world.rank)

    with pytest.raises(RuntimeError, match=r"Duplicate GPU detected: ranks \d and \d on cuda:0"):
        run(2, main, on=SimulatedAccelerators())


def test_a_tensor_of_the_host_is_refused() -> None:
    def main(world: World) -> None:
        world.broadcast(torch.ones(3), axes="rank").wait()

    with pytest.raises(RuntimeError, match=r"NCCL cannot send torch\.float32 of cpu"):
        run(2, main, on=SimulatedAccelerators())


def test_different_calls_are_mixed_by_nccl() -> None:
    def main(world: World) -> None:
        x = torch.ones(3 + world.rank, device=world.device)
        world.all_reduce(x, axes="rank").wait()

    with pytest.raises(RuntimeError, match=r"NCCL would mix different calls: rank \d calls all_reduce sum of \d"):
        run(2, main, on=SimulatedAccelerators())
