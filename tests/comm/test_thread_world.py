"""Test ranks as threads: their results, and the end of a run in which a rank fails."""

import re
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads


def fails(main: Callable[[World], object], *, size: int = 3) -> str:
    """The report of a run in which the ranks do not fit together. It must not take a timeout to find out."""
    with pytest.raises(RanksDisagree) as caught:
        run_threads(size, main, timeout=200)
    return re.sub(r"test_thread_world.py:\d+", "here", str(caught.value))


def test_results_come_in_the_order_of_the_ranks() -> None:
    def main(world: World, base: int) -> int:
        time.sleep(0.01 * (world.size - world.rank))
        return base + world.rank

    assert run_threads(4, main, args=(10,)) == [10, 11, 12, 13]


def test_sums_are_bit_identical_on_all_ranks_and_in_every_run() -> None:
    def main(world: World) -> bytes:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(world.rank))
        time.sleep(0.01 * ((world.rank * 7) % 4))
        world.all_reduce(x, axes="rank").wait()
        return x.numpy().tobytes()

    assert len(set(run_threads(4, main) + run_threads(4, main))) == 1


def test_views_over_other_meshes_share_transport_and_recorder() -> None:
    def main(world: World) -> float:
        grid = world.over(Mesh.of(dp=2, tp=2))
        x = torch.tensor([float(world.rank)])
        with world.record() as records:
            grid.all_reduce(x, axes="dp").wait()
        assert [record.axes for record in records] == [("dp",)]
        assert world.flight_recorder.position.record == records[0]
        return float(x)

    assert run_threads(4, main) == [2, 4, 2, 4]


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the mesh dp=3 has 3 ranks, the world 2"):
        run_threads(2, lambda world: world.over(Mesh.of(dp=3)))


# ---- how a run ends ------------------------------------------------------------------------------------------------


def test_the_exception_of_one_rank_is_raised_with_its_traceback_and_ends_the_others() -> None:
    ended, swallowed = [], []

    def main(world: World) -> None:
        if world.rank == 2:
            raise KeyError("the column")
        try:
            world.barrier()
        except Exception:  # noqa: BLE001 - what a careless user would write
            swallowed.append(world.rank)
        finally:
            ended.append(world.rank)

    with pytest.raises(KeyError, match="the column") as caught:
        run_threads(4, main, timeout=200)
    assert caught.value.__notes__ == ["(raised on rank 2 of 4)"]
    assert 'raise KeyError("the column")' in "".join(traceback.format_tb(caught.value.__traceback__))
    assert sorted(ended) == [0, 1, 3]
    assert not swallowed


def test_an_exception_in_a_backward_hook_ends_ranks_that_wait_in_theirs() -> None:
    def main(world: World) -> None:
        x = torch.ones(3, requires_grad=True)

        def hook(gradient: torch.Tensor) -> None:
            if world.rank == 1:
                raise ValueError("in the hook")
            world.all_reduce(gradient.clone(), axes="rank").wait()

        x.register_hook(hook)
        (x * 2).sum().backward()

    with pytest.raises(ValueError, match="in the hook"):
        run_threads(3, main, timeout=200)


def test_collectives_work_in_the_backward_of_each_rank() -> None:
    def main(world: World) -> list[float]:
        x = torch.ones(2, requires_grad=True)

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            world.all_reduce(total, axes="rank").wait()
            return total

        x.register_hook(hook)
        (x * (world.rank + 1)).sum().backward()
        assert x.grad is not None
        return [float(value) for value in x.grad]

    assert run_threads(3, main) == [[6, 6]] * 3


def test_another_size_is_reported_with_both_parties() -> None:
    called = threading.Semaphore(0)

    def main(world: World) -> None:
        if world.rank < 2:
            work = world.all_reduce(torch.ones(3), axes="rank")
            called.release()
            work.wait()
        else:
            assert all(called.acquire(timeout=200) for _ in range(2))
            world.all_reduce(torch.ones(4), axes="rank").wait()

    assert fails(main).splitlines() == [
        "the ranks called different collectives:",
        "  ranks 0,1      #0 all_reduce[rank] sum 3 float32 at comm/here main",
        "  rank 2         #0 all_reduce[rank] sum 4 float32 at comm/here main",
    ]


@pytest.mark.parametrize("other", ["kind", "dtype", "op", "root"])
def test_another_call_is_reported(other: str) -> None:
    def main(world: World) -> None:
        differs = world.rank == 1
        x = torch.ones(2, dtype=torch.float64 if differs and other == "dtype" else torch.float32)
        if differs and other == "kind":
            world.broadcast(x, axes="rank").wait()
        world.reduce(
            x,
            axes="rank",
            op="max" if differs and other == "op" else "sum",
            target=int(differs and other == "root"),
        ).wait()

    assert "the ranks called different collectives" in fails(main, size=2)


def test_parts_that_do_not_fit_each_other_are_reported() -> None:
    def main(world: World) -> None:
        sizes = (1, 3) if world.rank == 0 else (2, 2)
        into = [torch.empty(size) for size in sizes]
        world.all_gather(torch.ones(sizes[world.rank]), into=into, axes="rank").wait()

    assert re.match(
        r"rank \d gives \d elements of torch.float32 where \d of torch.float32 are expected", fails(main, size=2)
    )


def test_a_rank_that_finished_is_reported_to_those_who_wait() -> None:
    def main(world: World) -> None:
        if world.rank != 1:
            world.barrier()

    report = fails(main)
    assert report.startswith("rank 1 has finished while others wait:")
    assert re.search(r"rank [02] waits for rank.* in #0 barrier\[rank\] .*at comm/here main", report)
    assert "world.barrier()" in report


def test_a_circle_of_messages_is_reported() -> None:
    def main(world: World) -> None:
        world.send(torch.ones(1), axis="rank", to=(world.rank + 1) % world.size).wait()
        world.recv(torch.ones(1), axis="rank", source=(world.rank - 1) % world.size).wait()

    report = fails(main)
    assert report.startswith("every rank waits for another, none can go on:")
    assert "rank 0 waits for rank 1 in #0 send[rank] to 1" in report


def test_a_timeout_shows_the_stack_of_the_rank_that_computes() -> None:
    come, leave = threading.Event(), threading.Event()

    def main(world: World) -> None:
        if world.rank == 1:
            come.set()
            leave.wait(20)
        else:
            assert come.wait(200)
        world.barrier()

    with pytest.raises(RanksDisagree) as caught:
        run_threads(2, main, timeout=0.2)
    leave.set()
    assert "rank 0 has waited for 0.2 s" in str(caught.value)
    assert re.search(r"rank 1 is running\n.*test_thread_world.py:\d+ main\n +leave.wait\(20\)", str(caught.value))


# ---- the tensors of a collective -----------------------------------------------------------------------------------


def test_what_a_collective_will_fill_is_not_a_number_until_wait() -> None:
    def main(world: World) -> None:
        x, into = torch.ones(2), torch.zeros(4)
        work = world.all_gather(x, into=into, axes="rank")
        assert into.isnan().all()
        assert x.tolist() == [1, 1]
        work.wait()
        assert into.tolist() == [1, 1, 1, 1]

    run_threads(2, main)


def test_an_all_gather_keeps_the_slice_it_gathers_from() -> None:
    def main(world: World) -> None:
        into = torch.zeros(2)
        own = into[world.rank :][:1]
        own.fill_(world.rank + 5)
        work = world.all_gather(own, into=into, axes="rank")
        assert float(own) == world.rank + 5
        work.wait()
        assert into.tolist() == [5, 6]

    run_threads(2, main)


@pytest.mark.parametrize("written", ["input", "output"])
def test_writing_to_a_tensor_before_wait_is_an_error(written: str) -> None:
    def main(world: World) -> None:
        x, into = torch.ones(2), torch.zeros(4)
        work = world.all_gather(x, into=into, axes="rank")
        (x if written == "input" else into)[0] = 3
        work.wait()

    with pytest.raises(RuntimeError, match=r"written to before wait\(\); until then it belongs to #0 all_gather"):
        run_threads(2, main)


def test_not_a_number_may_be_sent() -> None:
    def main(world: World) -> bool:
        x, into = torch.full((2,), torch.nan), torch.zeros(4)
        world.all_gather(x, into=into, axes="rank").wait()
        return bool(into.isnan().all())

    assert run_threads(2, main) == [True, True]


def test_the_input_is_free_after_wait_and_a_copy_travels() -> None:
    def main(world: World) -> list[float]:
        x = torch.full((1,), float(world.rank))
        first, second = torch.empty(2), torch.empty(2)
        world.all_gather(x, into=first, axes="rank").wait()
        x += 10
        world.all_gather(x, into=second, axes="rank").wait()
        return [*first.tolist(), *second.tolist()]

    assert run_threads(2, main) == [[0, 1, 10, 11]] * 2


def test_writing_the_result_is_no_change_that_autograd_would_refuse() -> None:
    def main(world: World) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        loss = (weight**2).sum()
        world.all_reduce(weight, axes="rank", op="max").wait()
        loss.backward()

    run_threads(2, main)


def test_grad_mode_belongs_to_a_rank() -> None:
    def main(world: World) -> bool:
        if world.rank == 0:
            torch.set_grad_enabled(False)
        world.barrier()
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert run_threads(2, main) == [False, True]


def test_a_run_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # of which others may end meanwhile
    run_threads(4, lambda world: world.barrier())
    assert not set(threading.enumerate()) - before


def test_ranks_compute_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.comm.in_process.thread_and_trace_worlds._PATIENCE_SECONDS", 60.0)
    computing: list[int] = []

    def main(world: World) -> list[int]:
        beside = []
        for _ in range(20):
            computing.append(world.rank)
            time.sleep(0.001)  # where another thread would come in
            beside += [rank for rank in computing if rank != world.rank]
            computing.remove(world.rank)
            world.all_reduce(torch.ones(2), axes="rank").wait()
        return beside

    assert run_threads(4, main) == [[], [], [], []]


def test_a_rank_that_waits_without_a_collective_does_not_block_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwise.comm.in_process.thread_and_trace_worlds._PATIENCE_SECONDS", 0.05)
    told = threading.Event()

    def main(world: World) -> float:
        if world.rank < 3:
            assert told.wait(60)
        else:
            told.set()
        x = torch.ones(2)
        world.all_reduce(x, axes="rank").wait()
        return float(x[0])

    assert run_threads(4, main) == [4.0] * 4
