"""Test what was wrong on GPUs, found by reading or by the simulated accelerators; each of these tests failed before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional

from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.training import check, losses, parsed
from meshwise.comm.api.streams import streams_of, use_deterministic_kernels
from meshwise.comm.api.world import World
from meshwise.comm.network import choose_world, nccl_world
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import StateBeforeUpdate
from meshwise.memory.activation_offload import HostMover
from meshwise.memory.swap_file import BLOCK, SLAB, SwapConfig, SwapTransfer, aligned
from meshwise.memory.tiers import Tiers
from meshwise.plan.plan_keys import Offload
from meshwise.testing import agree, run

CPU = torch.device("cpu")


def squares(output: Tensor, _: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def test_stages_and_groups_connect_in_one_order() -> None:
    """Two stages waited for each other: one made the communicator of a message, the other one that of the answer."""
    check("pp=2 dp=2 zero=2 microbatches=4 schedule=zb-h1", on=SimulatedAccelerators())


def test_messages_have_one_urgent_stream_for_each_direction() -> None:
    """Each message took a fresh stream of the pool that NCCL takes its streams from, and could queue behind another."""

    def main(world: World) -> list[str]:
        made: list[str] = []
        create: Any = world.streams.create

        def counted(*, urgent: bool = False) -> Any:
            stream = create(urgent=urgent)
            made.append(stream.name)
            return stream

        world.streams.create = counted  # type: ignore[method-assign]
        losses(world, parsed("pp=2 microbatches=4"))
        return made

    for made in run(2, main, on=SimulatedAccelerators()):
        assert made == ["stream 0", "stream 0 (urgent)", "stream 1 (urgent)"]


def test_messages_are_posted_by_the_thread_that_sends() -> None:
    def main(world: World) -> set[str]:
        losses(world, parsed("pp=2 microbatches=4"))
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("meshwise messages")}

    assert run(2, main, on=SimulatedAccelerators()) == [set(), set()]


def test_communicators_are_released_in_one_order() -> None:
    """A release may wait for the other members, and each rank had its own order."""

    def main(world: World) -> None:
        for rank in (0, 1) if world.rank == 0 else (1, 0):
            x = torch.ones(1, device=world.device)
            group = world.over(world.mesh)
            if rank == 0:
                group.all_reduce(x, axes="rank").wait()
            else:
                world.prepare(lines=[(0, 1)])
        world.close()

    with pytest.raises(RuntimeError, match="every rank waits"):
        run(2, main, on=SimulatedAccelerators())  # made in different orders, which `prepare` exists for

    def sound(world: World) -> None:
        world.prepare(groups=[world.group("rank")], lines=[(0, 1), (1, 0)])
        world.close()

    run(2, sound, on=SimulatedAccelerators())
    released: list[tuple[int, ...]] = []

    def backend(_purpose: str, ranks: tuple[int, ...], _rank: int) -> Any:
        return SimpleNamespace(shutdown=lambda: released.append(ranks))

    for order in ([(0, 1), (0, 2), (0, 3)], [(0, 3), (0, 1), (0, 2)]):
        made = nccl_world.Communicators(backend)
        for ranks in order:
            made.of(ranks, rank=0)
        made.close()
    assert released[:3] == released[3:]


def test_both_directions_are_connected_before_the_first_step() -> None:
    """NCCL connects two ranks at their first message, which blocks the host: two ranks that both send would wait."""

    def main(world: World) -> None:
        world.prepare(lines=[(0, 1), (1, 0)])
        (sent, back), other = (torch.ones(3, device=world.device) for _ in range(2)), 1 - world.rank
        works = [world.send(sent, axis="rank", to=other), world.recv(back, axis="rank", source=other)]
        for work in works:
            work.wait()

    run(2, main, on=SimulatedAccelerators())


def test_messages_have_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, bool] = {}

    class Kind:
        class Options:
            is_high_priority_stream = False

        def __init__(self, _store: Any, _index: int, _size: int, options: Any) -> None:
            self.options = options

    class Group:
        BackendType = c10d.ProcessGroup.BackendType

        def __init__(self, *_: Any) -> None: ...

        def _set_default_backend(self, _kind: Any) -> None: ...

        def _register_backend(self, _device: Any, _kind: Any, backend: Kind) -> None:
            self.urgent = backend.options.is_high_priority_stream

    monkeypatch.setattr(nccl_world, "_preferred_class", lambda: Kind)
    monkeypatch.setitem(vars(c10d), "ProcessGroup", Group)
    make = nccl_world.nccl(HashStore())
    for purpose in ("", nccl_world.POINT_TO_POINT):
        made: Any = make(purpose, (0, 1), 0)
        asked[purpose] = made.urgent
    assert asked == {"": False, nccl_world.POINT_TO_POINT: True}


def test_a_call_that_the_device_does_not_pass_is_known() -> None:
    """A hang of NCCL was not reported: the host waits in a read of a number, which is no call."""

    def main(world: World) -> tuple[str, str]:
        x, side = torch.ones(3, device=world.device), world.streams.create()
        assert world.oldest_running_call is None
        side.wait_stream(world.streams.current())
        with world.streams.use(side):
            world.all_reduce(x, axes="rank").wait()
            before = str(world.oldest_running_call)
        side.synchronize()
        return before, str(world.oldest_running_call)

    for before, after in run(2, main, on=SimulatedAccelerators()):
        assert before.startswith("#0 all_reduce[rank] sum 3 float32")
        assert after == "None"


# ---- tiers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_a_buffer_of_a_read_that_nobody_waits_for_is_given_back_after_the_read(tmp_path: Path, kind: str) -> None:
    """A fetched unit that is not used gave its staging buffer back while the disk still wrote to it."""

    def main(streams: Any) -> None:
        tiers = Tiers(Offload.parse("params:disk"), streams=streams, swap=SwapConfig(folder=tmp_path))
        stored = tiers.empty("params", numel=1 << 12, dtype=torch.float32).fill_(1.0)
        assert tiers.file is not None
        go, read, pool = threading.Event(), tiers.file.read, tiers.file._pool
        transfers: list[SwapTransfer] = []

        def late(offset: int, into: Tensor) -> None:
            go.wait()
            read(offset, into=into).wait()

        def slow(offset: int, *, into: Tensor) -> SwapTransfer:
            transfers.append(SwapTransfer([pool.submit(late, offset, into)]))
            return transfers[-1]

        tiers.file.read = slow  # type: ignore[method-assign]
        tiers.bring(stored).release()
        assert not any(tiers._gathered._free.values()), "its read is under way"
        go.set()
        transfers[0].wait()
        tiers.close()
        assert [len(free) for free in tiers._gathered._free.values()] == [1]

    if kind == "cpu":
        main(streams_of(CPU))
    else:
        run(1, lambda world: main(world.streams), on=SimulatedAccelerators())


def test_copies_have_a_stream_for_each_direction() -> None:
    def main(world: World) -> None:
        mover = HostMover(world.streams)
        assert mover._out is not mover.back
        tiers = Tiers(Offload.parse("optimizer:cpu"), streams=world.streams)
        assert tiers._in is not tiers._out
        tiers.close()

    run(1, main, on=SimulatedAccelerators())


def test_a_host_buffer_waits_for_a_fetch_that_nobody_used() -> None:
    def main(world: World) -> None:
        mover = HostMover(world.streams)
        first = mover.park(torch.ones(1 << 16, dtype=torch.uint8, device=world.device), before=None)
        first.start()
        del first
        again = mover.park(torch.full((1 << 16,), 2, dtype=torch.uint8, device=world.device), before=None)
        assert again.fetch(ahead=0).eq(2).all()

    run(1, main, on=SimulatedAccelerators())


def test_pinned_memory_is_cut_from_slabs() -> None:
    """torch rounds each allocation of pinned memory up to a power of two."""

    def main(world: World) -> None:
        asked: list[int] = []
        empty = world.streams.host_empty

        def counted(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
            asked.append(shape[0])
            return empty(shape, dtype=dtype)

        world.streams.host_empty = counted  # type: ignore[method-assign]
        tiers = Tiers(Offload.parse("optimizer:cpu"), streams=world.streams)
        parts = [tiers.empty("optimizer", numel=5000, dtype=torch.float32) for _ in range(10)]
        assert asked == [SLAB]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert all(part.is_pinned() and part.data_ptr() % 4096 == parts[0].data_ptr() % 4096 for part in parts)
        for number, part in enumerate(parts):
            part.fill_(number)
        assert [part.mean().item() for part in parts] == list(range(10))
        mover = HostMover(world.streams)
        saved = [mover.park(torch.ones(100, device=world.device), before=None) for _ in range(10)]
        assert asked == [SLAB, SLAB]
        del saved

    run(1, main, on=SimulatedAccelerators())


def test_pinned_staging_buffers_have_no_room_that_doubles_them() -> None:
    """A staging buffer had a block more than its size, a power of two, and so took twice its size."""
    asked: list[int] = []

    class Pages:
        """Pinned memory begins at a page, as that of CUDA."""

        device = torch.device("cuda", 0)

        def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
            asked.append(shape[0])
            raw = torch.empty(shape[0] + BLOCK, dtype=dtype)
            return raw[-raw.data_ptr() % BLOCK :][: shape[0]]

    buffer = aligned(1 << 16, streams=Pages())  # type: ignore[arg-type]
    assert buffer.numel() == 1 << 16
    assert asked == [1 << 16]


def test_norms_keep_their_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast of CUDA computes norms and softmax in fp32, and casts to it and back."""

    dtypes: set[torch.dtype] = set()
    layer_norm = functional.layer_norm

    def seen(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        y = layer_norm(x, *rest, **more)
        dtypes.add(y.dtype)
        return y

    monkeypatch.setattr(functional, "layer_norm", seen)
    plan = parsed("dp=2 precision=bf16 recompute=full")
    [on_gpu, _] = run(2, losses, on=SimulatedAccelerators(), args=(plan,))
    assert dtypes == {torch.bfloat16}
    [on_cpu, _] = run(2, losses, args=(plan,))
    assert on_gpu == pytest.approx(on_cpu, rel=1e-6), "the CPU's autocast converts products alone, too"


def test_a_model_of_the_cpu_is_cut_before_its_buffers_go_to_the_gpu() -> None:
    """Its parameters stay on the CPU until it is cut, and batch norms failed there: their buffers were on the GPU."""

    def main(world: World) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        batches = [torch.arange(24.0).view(6, 4).sin().double() + step for step in range(3)]
        options = Options(example=batches[0], forward=lambda model, batch: model(batch))
        trainer = parallelize(model, "pp=2 microbatches=2", loss=squares, world=world, lr=1e-2, options=options)
        return [trainer.step(batch).loss for batch in batches]

    found, expected = run(2, main, on=SimulatedAccelerators()), run(2, main)
    agree(torch.tensor(found), torch.tensor(expected), bound=1e-9)


# ---- the rest ----------------------------------------------------------------------------------------------------


def test_a_step_that_failed_puts_the_generator_of_the_device_back() -> None:
    def main(world: World) -> tuple[Tensor, Tensor]:
        generator, before = world.streams.generator(), StateBeforeUpdate([nn.Linear(2, 2)])
        before.keep()
        first = torch.rand(3, generator=generator)
        before.put_back()
        return first, torch.rand(3, generator=generator)

    [(first, second)] = run(1, main, on=SimulatedAccelerators())
    agree(second, first, bound=0)


def test_ranks_of_a_host_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_world, "gpu_count", lambda: 4)
    for name in choose_world.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="LOCAL_RANK is not set on a host with 4 GPUs: each rank would take the first"):
        choose_world.default_device()
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert choose_world.default_device() == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert choose_world.default_device() == torch.device("cuda", 1)
    monkeypatch.setattr(choose_world, "gpu_count", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("SLURM_LOCALID")
    assert choose_world.default_device() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "version, asked, expected",
    [("2.14.0", None, "old"), ("2.15.0a0+git1", None, "new"), ("2.15.1", "0", "old"), ("2.14.0", "1", "new")],
)
def test_the_class_of_nccl_groups_is_the_one_that_torch_prefers(
    version: str, asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setitem(vars(c10d), "ProcessGroupNCCL", SimpleNamespace(name="old"))
    monkeypatch.setitem(vars(c10d), "ProcessGroupNCCL2", SimpleNamespace(name="new"))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", asked)
    assert nccl_world._preferred_class().name == expected


def test_exchanged_bytes_are_not_decoded_one_by_one() -> None:
    """A list of one number for each byte took 100 times the memory."""

    def main(world: World) -> int:
        value = bytes(range(256)) * 4000
        assert world.exchange(value) == [value, value]
        return 1

    with pytest.MonkeyPatch.context() as patched:
        decode = Tensor.tolist
        patched.setattr(Tensor, "tolist", lambda x: pytest.fail("one by one") if x.dtype == torch.uint8 else decode(x))
        assert run(2, main) == [1, 1]


def test_complex_numbers_travel_over_nccl_as_their_parts() -> None:
    def main(world: World) -> dict[str, Any]:
        x = torch.complex(torch.arange(6.0), torch.arange(6.0) + world.rank).to(world.device)
        summed, whole, part, sent = x.clone(), x.new_empty(12), x.new_empty(3), x.clone()
        world.all_reduce(summed, axes="rank").wait()
        world.all_gather(x, into=whole, axes="rank").wait()
        world.reduce_scatter(x, into=part, axes="rank").wait()
        world.broadcast(sent, axes="rank", source=1).wait()
        received = torch.empty_like(x)
        world.prepare(lines=[(0, 1), (1, 0)])
        works = [
            world.send(x, axis="rank", to=1 - world.rank),
            world.recv(received, axis="rank", source=1 - world.rank),
        ]
        for work in works:
            work.wait()
        with pytest.raises(ValueError, match="torch has no max of"):
            world.all_reduce(x, axes="rank", op="max")
        found = {"sum": summed, "whole": whole, "part": part, "sent": sent, "received": received}
        return {name: torch.view_as_real(value).cpu().clone() for name, value in found.items()}

    agree(run(2, main, on=SimulatedAccelerators()), run(2, main), bound=0.0)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the kernels of torch after a test of `deterministic=1`, and begin without CUDA's setting."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(mode=False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("_kernels")
def test_deterministic_plans_use_deterministic_kernels_alone() -> None:
    check("dp=2 deterministic=1", on=SimulatedAccelerators())
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    class Puts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.put(torch.zeros(1, dtype=torch.int64), x.new_ones(1)))

    trainer = parallelize(Puts(2, 2), "deterministic=1", loss=lambda y, _: (y.sum(), 1), lr=1.0)
    with pytest.raises(RuntimeError, match=r"put_.* does not have a deterministic implementation"):
        trainer.step(torch.ones(2, 2))


@pytest.mark.usefixtures("_kernels")
def test_a_rehearsal_of_a_deterministic_plan_leaves_the_kernels_of_this_process_alone() -> None:
    use_deterministic_kernels(torch.device("meta"))
    assert not torch.are_deterministic_algorithms_enabled()
