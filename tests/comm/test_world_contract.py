"""Test the promises of every World, on threads and on real processes with the same functions.

    mesh  dp=2 one=1 tp=2         groups along dp: 0 2 | 1 3      tp: 0 1 | 2 3      dp and tp: 0 1 2 3      one: itself

Rank r holds whole numbers that a formula gives for any rank, small enough to be exact in every dtype. So each rank
computes the expected values from the formula alone, and compares exactly."""

import uuid
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from early_calls import no_call_waits_for_one_that_another_rank_has_yet_to_make
from joined_worlds import joined
from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import Group, Work, World
from meshwise.testing import run
from refused_calls import a_refused_call_was_not_made, bad_calls_are_refused_before_anything_moves
from warm_processes import Processes

MESH = Mesh.of(dp=2, one=1, tp=2)
AXES: tuple[str | tuple[str, ...], ...] = ("dp", "tp", "one", ("tp", "dp"), ("dp", "one"))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *WHOLE, torch.bool)
REDUCTIONS = (
    *((dtype, "sum") for dtype in (*FLOATS, *WHOLE)),
    (FLOATS[0], "max"),
    (FLOATS[2], "min"),
    (WHOLE[0], "max"),
)
LENGTHS = (0, 1, 40_003)  # nothing; what travels with the call; what is read where it lies, with an odd end
# Every dtype at one length, every length in one dtype.
SUMS = (*((dtype, op, 5) for dtype, op in REDUCTIONS), *((torch.float64, "sum", length) for length in LENGTHS))
MOVES = (*((dtype, 5) for dtype in DTYPES), *((torch.float32, length) for length in LENGTHS))


def values(rank: int, length: int, dtype: torch.dtype = torch.float32, *, salt: int = 0) -> Tensor:
    """What rank `rank` holds."""
    numbers = (torch.arange(length) * 7 + rank * 3 + salt) % 11
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def reduced(group: Group, length: int, dtype: torch.dtype, op: str) -> Tensor:
    """The reduction of the group's values."""
    stacked = torch.stack([values(rank, length, dtype) for rank in group.ranks])
    if op == "sum":
        return stacked.sum(0).to(dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def uneven(size: int) -> list[int]:
    """As many unequal lengths, one of them zero."""
    return [(3 * index) % 7 for index in range(size)]


def equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), f"{found} is not {expected}"


def everywhere(world: World) -> Iterator[tuple[World, str | tuple[str, ...], Group]]:
    view = world.over(MESH)
    for axes in AXES:
        yield view, axes, view.group(axes)


# ---- the mains: each runs on all four ranks ------------------------------------------------------------------------


def groups(world: World) -> None:
    for view, axes, group in everywhere(world):
        names = {axes} if isinstance(axes, str) else set(axes)
        named = tuple(name for name in MESH.names if name in names)
        assert group.axes == (tuple(name for name in named if MESH.degree(name) > 1) or named)
        assert group.ranks == MESH.group(world.rank, axes=group.axes)
        assert group.ranks[group.index] == world.rank
        assert view.size == 4


def broadcast(world: World) -> None:
    for view, axes, group in everywhere(world):
        for source in range(group.size):
            for dtype, length in MOVES if source == 0 else MOVES[-1:]:
                x = values(world.rank, length, dtype)
                view.broadcast(x, axes=axes, source=source).wait()
                equal(x, values(group.ranks[source], length, dtype))


def all_reduce(world: World) -> None:
    for view, axes, group in everywhere(world):
        for dtype, op, length in SUMS:
            x = values(world.rank, length, dtype)
            view.all_reduce(x, axes=axes, op=op).wait()
            equal(x, reduced(group, length, dtype, op))
        found = values(world.rank, 5, torch.bool)
        view.all_reduce(found, axes=axes, op="max").wait()
        equal(found, reduced(group, 5, torch.bool, "max"))


def half_precision_is_rounded_once(world: World) -> None:
    """1, 2^-8, 2^-8, 2^-8 in bfloat16: each addition by itself would round away, their sum does not."""
    expected = torch.full((3,), 1.0 + 3 * 2**-8).to(torch.bfloat16)
    x = torch.full((3,), 1.0 if world.rank == 0 else 2**-8, dtype=torch.bfloat16)
    part, whole = torch.empty(3, dtype=torch.bfloat16), x.repeat(world.size)
    world.reduce_scatter(whole, into=part, axes="rank").wait()
    world.all_reduce(x, axes="rank").wait()
    equal(x, expected)
    equal(part, expected)


def all_reduce_is_bit_identical(world: World) -> None:
    for view, axes, _ in everywhere(world):
        for length in (7, 40_000):
            x = torch.randn(length, generator=torch.Generator().manual_seed(world.rank))
            view.all_reduce(x, axes=axes).wait()
            for other in view.exchange(x.sum(dtype=torch.float64).item(), axes=axes):
                assert other == x.sum(dtype=torch.float64).item()


def reduce(world: World) -> None:
    for view, axes, group in everywhere(world):
        for target in range(group.size):
            for op, length in (("max", 5), ("min", 5), *(("sum", length) for length in LENGTHS)):
                x = values(world.rank, length, torch.float64)
                view.reduce(x, axes=axes, target=target, op=op).wait()
                if group.index == target:
                    equal(x, reduced(group, length, torch.float64, op))


def all_gather(world: World) -> None:
    for view, axes, group in everywhere(world):
        for dtype, length in MOVES:
            expected = torch.cat([values(rank, length, dtype) for rank in group.ranks])
            whole = torch.zeros_like(expected)
            view.all_gather(values(world.rank, length, dtype), into=whole, axes=axes).wait()
            equal(whole, expected)
            whole = torch.zeros_like(expected)
            own = whole[group.index * length : (group.index + 1) * length]
            own.copy_(values(world.rank, length, dtype))
            view.all_gather(own, into=whole, axes=axes).wait()
            equal(whole, expected)


def all_gather_of_unequal_parts(world: World) -> None:
    for view, axes, group in everywhere(world):
        for dtype in DTYPES:
            lengths = uneven(group.size)
            parts = [torch.zeros(length, dtype=dtype) for length in lengths]
            view.all_gather(values(world.rank, lengths[group.index], dtype), into=parts, axes=axes).wait()
            for part, rank, length in zip(parts, group.ranks, lengths, strict=True):
                equal(part, values(rank, length, dtype))


def reduce_scatter(world: World) -> None:
    for view, axes, group in everywhere(world):
        for dtype, op, length in SUMS:
            start, stop = group.index * length, (group.index + 1) * length
            expected = reduced(group, length * group.size, dtype, op)[start:stop]
            x = values(world.rank, length * group.size, dtype)
            into = torch.zeros(length, dtype=dtype)
            view.reduce_scatter(x, into=into, axes=axes, op=op).wait()
            equal(into, expected)
            equal(x, values(world.rank, length * group.size, dtype))
            view.reduce_scatter(x, into=x[start:stop], axes=axes, op=op).wait()
            equal(x[start:stop], expected)


def reduce_scatter_of_unequal_parts(world: World) -> None:
    for view, axes, group in everywhere(world):
        lengths = uneven(group.size)
        whole = values(world.rank, sum(lengths), torch.float64)
        into = torch.zeros(lengths[group.index], dtype=torch.float64)
        view.reduce_scatter(list(whole.split(lengths)), into=into, axes=axes).wait()
        equal(into, reduced(group, sum(lengths), torch.float64, "sum").split(lengths)[group.index])


def all_to_all(world: World) -> None:
    for view, axes, group in everywhere(world):
        for dtype, length in MOVES:
            x = torch.cat([values(world.rank, length, dtype, salt=other) for other in group.ranks])
            into = torch.zeros_like(x)
            view.all_to_all(x, into=into, axes=axes).wait()
            equal(into, torch.cat([values(other, length, dtype, salt=world.rank) for other in group.ranks]))


def all_to_all_of_unequal_parts(world: World) -> None:
    def length(source: int, target: int) -> int:
        return (source * 5 + target * 3) % 4

    for view, axes, group in everywhere(world):
        me = world.rank
        x = [values(me, length(me, other), salt=other) for other in group.ranks]
        into = [torch.zeros(length(other, me)) for other in group.ranks]
        view.all_to_all(x, into=into, axes=axes).wait()
        for part, other in zip(into, group.ranks, strict=True):
            equal(part, values(other, length(other, me), salt=me))


def gather_and_scatter(world: World) -> None:
    for view, axes, group in everywhere(world):
        for root in range(group.size):
            lengths = uneven(group.size)
            here = group.index == root
            parts = [torch.zeros(length, dtype=torch.int64) for length in lengths] if here else None
            own = values(world.rank, lengths[group.index], torch.int64)
            view.gather(own, into=parts, axes=axes, target=root).wait()
            for part, rank, length in zip(parts or [], group.ranks, lengths, strict=False):
                equal(part, values(rank, length, torch.int64))
            back = torch.zeros_like(own)
            view.scatter(parts, into=back, axes=axes, source=root).wait()
            equal(back, own)
            if here:
                with pytest.raises(ValueError, match="the target of a gather must pass `into`, but passed None"):
                    view.gather(own, into=None, axes=axes, target=root)
                with pytest.raises(ValueError, match="the source of a scatter must pass `x`, but passed None"):
                    view.scatter(None, into=back, axes=axes, source=root)
            whole = torch.zeros(2 * group.size) if here else None
            view.gather(values(world.rank, 2), into=whole, axes=axes, target=root).wait()
            if whole is not None:
                equal(whole, torch.cat([values(rank, 2) for rank in group.ranks]))


def messages_arrive_in_order(world: World) -> None:
    ring = world.over(Mesh.of(ring=4))
    after, before = (world.rank + 1) % 4, (world.rank - 1) % 4
    received = [torch.zeros(length) for length in (3, 3, 10_000)]
    works = [ring.send(values(world.rank, len(x), salt=at), axis="ring", to=after) for at, x in enumerate(received)]
    works += [ring.recv(x, axis="ring", source=before) for x in received]
    for work in works:
        work.wait()
    for at, x in enumerate(received):
        equal(x, values(before, len(x), salt=at))


def many_are_in_flight_and_waited_for_in_any_order(world: World) -> None:
    view = world.over(MESH)
    pending: list[tuple[Work, Tensor, Tensor]] = []
    for step in range(6):
        for axes in ("dp", "tp", ("dp", "tp")):
            group = view.group(axes)
            x = values(world.rank, 9_000 + step, torch.float64)
            pending.append((view.all_reduce(x, axes=axes), x, reduced(group, len(x), torch.float64, "sum")))
            into = torch.zeros(3 * group.size)
            expected = torch.cat([values(rank, 3, salt=step) for rank in group.ranks])
            pending.append((view.all_gather(values(world.rank, 3, salt=step), into=into, axes=axes), into, expected))
    for work, found, expected in reversed(pending):
        work.wait()
        work.wait()
        equal(found, expected)


def values_are_exchanged(world: World) -> None:
    for view, axes, group in everywhere(world):
        everyone = view.exchange({"rank": world.rank, "text": "x" * world.rank}, axes=axes)
        assert everyone == [{"rank": rank, "text": "x" * rank} for rank in group.ranks]
    assert world.exchange(world.rank) == [0, 1, 2, 3]


def barriers(world: World) -> None:
    for view, axes, _ in everywhere(world):
        view.barrier(axes=axes)
    world.barrier()


def parameters_are_no_matter_for_autograd(world: World) -> None:
    view = world.over(MESH)
    for axes in AXES:
        weight = torch.nn.Parameter(torch.ones(4))
        loss = (weight**2).sum()
        view.broadcast(weight, axes=axes).wait()
        view.all_gather(torch.ones(4 // view.group(axes).size), into=weight, axes=axes).wait()
        loss.backward()  # autograd would refuse a saved tensor that was changed in place


def digests_agree_and_the_records_say_what_was_called(world: World) -> None:
    view = world.over(MESH)
    with view.record() as records:
        view.all_reduce(torch.ones(2, 3), axes="dp").wait()
        view.all_gather(torch.ones(3, dtype=torch.bfloat16), into=torch.ones(6, dtype=torch.bfloat16), axes="tp").wait()
        view.all_reduce(torch.ones(2), axes="one").wait()
    assert [str(record).split(" ", 1)[1].split(" at ")[0] for record in records] == [
        "all_reduce[dp] sum 2x3 float32",
        "all_gather[tp] 6 bfloat16",
    ]
    assert [record.bytes for record in records] == [24, 12]
    assert all("test_world_contract.py" in record.site for record in records)
    for axes in ("dp", "tp"):
        digest = view.flight_recorder.digests[view.group(axes).ranks]
        assert len(set(view.exchange(digest, axes=("dp", "tp")))) in (1, 2)
        assert len(set(view.exchange(digest, axes=axes))) == 1


def tensors_are_what_they_read_as(world: World) -> None:
    """Torch conjugates and negates when a tensor is read: its memory holds something else."""
    view = world.over(MESH)
    group = view.group("tp")

    def held(rank: int) -> Tensor:
        return torch.complex(torch.arange(6.0), torch.full((6,), 1.0 + rank)).conj()

    own, other = held(world.rank), 1 - group.index
    expected = [held(rank).resolve_conj() for rank in group.ranks]
    parts, into, received = torch.empty_like(torch.stack(expected)), own[:3].clone(), own.clone()
    view.all_gather(own, into=parts, axes="tp").wait()
    equal(parts, torch.stack(expected))
    view.reduce_scatter(own, into=into, axes="tp").wait()
    equal(into, (expected[0] + expected[1]).chunk(2)[group.index])
    view.all_to_all([own, own], into=list(parts.zero_()), axes="tp").wait()
    equal(parts, torch.stack(expected))
    for work in (view.send(own, axis="tp", to=other), view.recv(received, axis="tp", source=other)):
        work.wait()
    equal(received, expected[other])
    for source in range(2):
        x = own if group.index == source else own.clone()
        view.broadcast(x, axes="tp", source=source).wait()
        equal(x, expected[source])
    summed = own.clone() if group.index == 0 else own
    view.reduce(summed, axes="tp").wait()
    if group.index == 0:
        equal(summed, expected[0] + expected[1])
    negative = torch.empty(2)
    view.all_gather(own[:1].imag, into=negative, axes="tp").wait()
    assert negative.tolist() == [-1.0 - rank for rank in group.ranks]
    for written in (own, own[:1].imag):
        with pytest.raises(ValueError, match="resolve_conj"):
            view.all_reduce(written, axes="tp")


def inference_leaves_nothing_that_cannot_be_written_to(world: World) -> None:
    for dtype in (torch.float32, torch.uint8):
        with torch.inference_mode():
            made = values(world.rank, 300_000, dtype)
            work = world.all_reduce(made, axes="rank")
        work.wait()
        x = values(world.rank, 300_000, dtype)
        world.all_reduce(x, axes="rank").wait()
        equal(x, made)
        world.all_gather(made[:3], into=torch.empty(12, dtype=dtype), axes="rank").wait()


MAINS = (
    groups,
    broadcast,
    all_reduce,
    all_reduce_is_bit_identical,
    half_precision_is_rounded_once,
    reduce,
    all_gather,
    all_gather_of_unequal_parts,
    reduce_scatter,
    reduce_scatter_of_unequal_parts,
    all_to_all,
    all_to_all_of_unequal_parts,
    gather_and_scatter,
    messages_arrive_in_order,
    many_are_in_flight_and_waited_for_in_any_order,
    no_call_waits_for_one_that_another_rank_has_yet_to_make,
    values_are_exchanged,
    barriers,
    parameters_are_no_matter_for_autograd,
    digests_agree_and_the_records_say_what_was_called,
    tensors_are_what_they_read_as,
    inference_leaves_nothing_that_cannot_be_written_to,
    bad_calls_are_refused_before_anything_moves,
    a_refused_call_was_not_made,
)


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__name__)
def test_on_threads(main: Callable[[World], None]) -> None:
    run(4, main)


def joined_by(world: World, name: str, how: str) -> None:
    """Run all mains on another world of the same processes."""
    other = joined(world, name, how)
    for main in MAINS:
        print(main.__name__, flush=True)  # the last one is what failed
        main(other)
    other.close()


@pytest.mark.processes
@pytest.mark.parametrize("how", ["shared memory", "gloo"])
def test_on_processes(how: str, processes: Processes) -> None:
    run(4, joined_by, on=processes, args=(uuid.uuid4().hex, how))
