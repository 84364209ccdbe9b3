"""Real processes: every collective against its definition, and what must not go wrong under way.

rank j holds the tensor  t(j) = j + 1, elementwise times (1 … n), so every result is known on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshwise.comm import RanksDisagree, World
from meshwise.mesh import Mesh
from meshwise.testing import Processes, run

pytestmark = pytest.mark.processes

SIZE = 4
# One phase; two phases (above 256 KB), with a length that no number of ranks divides; large messages (1 MB and more).
LENGTHS = (1, 6, (1 << 17) + 3, 1 << 20)


def held(rank: int, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(1, length + 1) * (rank + 1)).to(dtype)


def uneven(size: int) -> list[int]:
    """Parts of unequal size, one of them empty."""
    return [3 * index for index in range(size)]


def same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0)


def reductions(world: World) -> None:
    everyone = range(world.size)
    for length in LENGTHS:
        stacked = torch.stack([held(rank, length) for rank in everyone])
        for op, expected in (("sum", stacked.sum(0)), ("max", stacked.amax(0)), ("min", stacked.amin(0))):
            x = held(world.rank, length)
            world.all_reduce(x, axes="rank", op=op).wait()
            same(x, expected)
            x = held(world.rank, length)
            world.reduce(x, axes="rank", target=1, op=op).wait()
            if world.rank == 1:
                same(x, expected)
        if length % world.size == 0:
            x, part = held(world.rank, length), torch.empty(length // world.size, dtype=torch.float64)
            world.reduce_scatter(x, into=part, axes="rank").wait()
            same(part, stacked.sum(0).chunk(world.size)[world.rank])
            same(x, held(world.rank, length))


def moves(world: World) -> None:
    everyone, last = range(world.size), world.size - 1
    for length in LENGTHS:
        x = held(world.rank, length)
        world.broadcast(x, axes="rank", source=last).wait()
        same(x, held(last, length))

        gathered = torch.empty(world.size * length, dtype=torch.float64)
        world.all_gather(held(world.rank, length), into=gathered, axes="rank").wait()
        same(gathered, torch.cat([held(rank, length) for rank in everyone]))

        received = torch.empty(world.size * length, dtype=torch.float64)
        world.all_to_all(gathered * (world.rank + 1), into=received, axes="rank").wait()
        same(received, torch.cat([held(world.rank, length) * (rank + 1) for rank in everyone]))

        whole = torch.empty_like(gathered) if world.rank == 1 else None
        world.gather(held(world.rank, length), into=whole, axes="rank", target=1).wait()
        if whole is not None:
            same(whole, gathered)
        part = torch.empty(length, dtype=torch.float64)
        world.scatter(whole, into=part, axes="rank", source=1).wait()
        same(part, held(world.rank, length))


def unequal_parts(world: World) -> None:
    sizes, everyone = uneven(world.size), range(world.size)
    parts = [torch.empty(size) for size in sizes]
    world.all_gather(held(world.rank, sizes[world.rank], torch.float32), into=parts, axes="rank").wait()
    for rank, part in enumerate(parts):
        same(part, held(rank, sizes[rank], torch.float32))

    own = torch.empty(sizes[world.rank])
    world.reduce_scatter([held(world.rank, size, torch.float32) for size in sizes], into=own, axes="rank").wait()
    same(own, torch.stack([held(rank, len(own), torch.float32) for rank in everyone]).sum(0))

    received = [torch.empty(sizes[world.rank]) for _ in everyone]
    world.all_to_all([held(world.rank, size, torch.float32) for size in sizes], into=received, axes="rank").wait()
    for rank, part in enumerate(received):
        same(part, held(rank, len(part), torch.float32))

    target = [torch.empty(size) for size in sizes] if world.rank == 0 else None
    world.gather(held(world.rank, sizes[world.rank], torch.float32), into=target, axes="rank").wait()
    own.zero_()
    world.scatter(target, into=own, axes="rank").wait()
    same(own, held(world.rank, len(own), torch.float32))


def in_place(world: World) -> None:
    whole = torch.zeros(world.size * 5)
    own = whole[world.rank * 5 : (world.rank + 1) * 5]
    own.copy_(held(world.rank, 5, torch.float32))
    world.all_gather(own, into=whole, axes="rank").wait()
    same(whole, torch.cat([held(rank, 5, torch.float32) for rank in range(world.size)]))
    world.reduce_scatter(whole, into=own, axes="rank").wait()
    same(own, world.size * held(world.rank, 5, torch.float32))


def several_axes(world: World) -> list[float]:
    """Rank r counts 10^r, so a sum shows who took part."""
    mesh = world.over(Mesh.of(a=2, b=world.size // 2))
    sums = []
    for axes in ("a", "b", ("b", "a"), ()):
        x = torch.tensor(10.0**world.rank)
        mesh.all_reduce(x, axes=axes).wait()
        sums.append(x.item())
    return sums


def only_some(world: World) -> float | None:
    """The first group along b calls, the other does not."""
    mesh = world.over(Mesh.of(a=2, b=world.size // 2))
    if mesh.mesh.coordinate(world.rank)["a"] == 1:
        return None
    x = torch.ones(1)
    mesh.all_reduce(x, axes="b").wait()
    return x.item()


def messages(world: World) -> None:
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = [torch.full((3,), 10.0 * world.rank + index) for index in range(5)]
    works = [world.send(x, axis="rank", to=to) for x in sent]
    for index in range(5):
        x = torch.empty(3)
        world.recv(x, axis="rank", source=source).wait()
        same(x, torch.full((3,), 10.0 * source + index))
    for work in works:
        work.wait()


def many_in_flight(world: World) -> None:
    """Started in one order, finished in the opposite one, equal sizes and kinds among them."""
    sums = [held(world.rank, 1 << 18) + index for index in range(6)]
    parts = [torch.empty(world.size * 7) for _ in range(6)]
    works = []
    for x, whole in zip(sums, parts, strict=True):
        works.append(world.all_reduce(x, axes="rank"))
        works.append(world.all_gather(held(world.rank, 7, torch.float32), into=whole, axes="rank"))
    for work in reversed(works):
        work.wait()
        work.wait()
    total = sum(rank + 1 for rank in range(world.size))
    for index, (x, whole) in enumerate(zip(sums, parts, strict=True)):
        same(x, held(0, 1 << 18) * total + index * world.size)
        same(whole, torch.cat([held(rank, 7, torch.float32) for rank in range(world.size)]))


def kinds_of_numbers(world: World) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        x = torch.full((5,), world.rank + 1).to(dtype)
        world.all_reduce(x, axes="rank").wait()
        same(x, torch.full((5,), sum(range(1, world.size + 1))).to(dtype))
    x = torch.tensor([world.rank == 1, False])
    whole = torch.empty(2 * world.size, dtype=torch.bool)
    world.all_gather(x, into=whole, axes="rank").wait()
    assert whole.view(-1, 2)[:, 0].tolist() == [rank == 1 for rank in range(world.size)]


def half_sums(world: World) -> list[float]:
    """1, 2^-8, 2^-8, 2^-8: each addition rounds away in bfloat16, their sum does not."""
    x = torch.full((3,), 1.0 if world.rank == 0 else 2**-8, dtype=torch.bfloat16)
    world.all_reduce(x, axes="rank").wait()
    return x.tolist()


def one_order(world: World) -> tuple[Tensor, ...]:
    """The same random values through four routes to their sum."""
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(1 << 18, generator=generator)
    reduced, small, target = values.clone(), values[:4096].clone(), values.clone()
    part, whole = torch.empty(values.numel() // world.size), torch.empty_like(values)
    world.all_reduce(reduced, axes="rank").wait()
    world.all_reduce(small, axes="rank").wait()
    world.reduce(target, axes="rank").wait()
    world.reduce_scatter(values, into=part, axes="rank").wait()
    world.all_gather(part, into=whole, axes="rank").wait()
    return reduced, whole, small, target


def nothing_to_move(world: World) -> None:
    empty = torch.empty(0)
    world.all_reduce(empty, axes="rank").wait()
    world.all_gather(empty, into=torch.empty(0), axes="rank").wait()
    world.reduce_scatter(empty, into=torch.empty(0), axes="rank").wait()
    world.broadcast(empty, axes="rank").wait()


def disagreeing(world: World) -> None:
    """Its error ends the processes: ranks that have disagreed serve no other test."""
    checked = world.over(world.mesh)
    checked.check = True
    x = torch.zeros(7 if world.rank == 2 else 8)
    checked.all_reduce(torch.zeros(3), axes="rank").wait()
    checked.all_reduce(x, axes="rank").wait()


@pytest.mark.parametrize(
    "main",
    [
        reductions,
        moves,
        unequal_parts,
        in_place,
        messages,
        many_in_flight,
        kinds_of_numbers,
        nothing_to_move,
    ],
)
def test_every_result_is_that_of_the_definition(main: object, processes: Processes) -> None:
    assert callable(main)
    run(SIZE, main, on=processes)


def test_a_group_is_the_ranks_along_its_axes(processes: Processes) -> None:
    # a\b  0  1
    #  0   0  1
    #  1   2  3
    assert run(SIZE, several_axes, on=processes) == [
        [101.0, 11.0, 1111.0, 1.0],
        [1010.0, 11.0, 1111.0, 10.0],
        [101.0, 1100.0, 1111.0, 100.0],
        [1010.0, 1100.0, 1111.0, 1000.0],
    ]


def test_only_the_ranks_of_a_group_have_to_call(processes: Processes) -> None:
    assert run(SIZE, only_some, on=processes) == [2.0, 2.0, None, None]


def test_half_precision_is_rounded_once(processes: Processes) -> None:
    for sums in run(SIZE, half_sums, on=processes):
        assert sums == [torch.tensor(1.0 + 3 * 2**-8).to(torch.bfloat16).item()] * 3


def test_all_routes_to_a_sum_give_the_same_bits_on_every_rank(processes: Processes) -> None:
    results: Sequence[tuple[Tensor, ...]] = run(SIZE, one_order, on=processes)
    in_order = torch.stack([torch.randn(1 << 18, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)])
    expected = ((in_order[0] + in_order[1]) + in_order[2]) + in_order[3]
    for reduced, whole, small, _ in results:
        same(reduced, expected)
        same(whole, expected)
        same(small, expected[:4096])
    same(results[0][3], expected)


def test_check_mode_names_who_differs_before_anything_hangs(processes: Processes) -> None:
    with pytest.raises(RanksDisagree) as caught:
        run(SIZE, disagreeing, on=processes)
    report = str(caught.value)
    assert "rank 2 " in report
    assert "ranks 0,1,3" in report
    assert "all_reduce[rank] sum 7 float32" in report
    assert "test_torch_world.py" in report
