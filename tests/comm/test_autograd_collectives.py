"""Test that the backward of each collective is its adjoint: ⟨F x, g⟩ = ⟨x, F* g⟩.

The inner products run over all ranks. Values that are equal on all ranks count once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import Work, World
from meshwise.comm.in_process.thread_and_trace_worlds import ThreadWorld, TraceWorld, run_threads

SIZE = 3
SHAPE = (6, 4, 5)
UNEVEN = (1, 0, 3)


def tensor(shape: Sequence[int], *, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def resized(shape: Sequence[int], **dims: int) -> tuple[int, ...]:
    """SHAPE with dim d set to n: resized(SHAPE, d1=3)."""
    changed = {int(name[1:]): size for name, size in dims.items()}
    return tuple(changed.get(dim, size) for dim, size in enumerate(shape))


@dataclass(frozen=True)
class Case:
    """A collective, what each rank puts in, what it means to get out, and which of them are alike on all ranks."""

    name: str
    call: Callable[..., gradient.PendingResult]
    shape: Callable[[int], tuple[int, ...]]
    expected: Callable[[list[Tensor], int], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    alike_in: bool = False
    alike_out: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.options}"

    def input(self, rank: int) -> Tensor:
        return tensor(self.shape(rank), seed=0 if self.alike_in else rank)

    def inputs(self) -> list[Tensor]:
        return [self.input(rank) for rank in range(SIZE)]


def gathers(name: str, call: Callable[..., gradient.PendingResult], *, alike_out: bool) -> list[Case]:
    return [
        Case(name, call, lambda _: SHAPE, lambda x, _: torch.cat(x, 0), {}, alike_out=alike_out),
        Case(name, call, lambda _: SHAPE, lambda x, _: torch.cat(x, 2), {"dim": -1}, alike_out=alike_out),
        Case(
            name,
            call,
            lambda rank: resized(SHAPE, d0=UNEVEN[rank]),
            lambda x, _: torch.cat(x, 0),
            {"dim": 0, "sizes": UNEVEN},
            alike_out=alike_out,
        ),
        Case(
            name,
            call,
            lambda rank: resized(SHAPE, d1=UNEVEN[rank]),
            lambda x, _: torch.cat(x, 1),
            {"dim": 1, "sizes": UNEVEN},
            alike_out=alike_out,
        ),
    ]


def cuts(name: str, call: Callable[..., gradient.PendingResult], whole: Callable[[list[Tensor]], Tensor]) -> list[Case]:
    alike_in = name == "take"
    return [
        Case(name, call, lambda _: SHAPE, lambda x, r: whole(x).split(2, 0)[r], {}, alike_in),
        Case(name, call, lambda _: SHAPE, lambda x, r: whole(x).split([2, 1, 1], 1)[r], {"dim": 1}, alike_in),
        Case(
            name,
            call,
            lambda _: SHAPE,
            lambda x, r: whole(x).split(UNEVEN, 1)[r],
            {"dim": -2, "sizes": UNEVEN},
            alike_in,
        ),
    ]


def exchanged(x: list[Tensor], rank: int, split: tuple[int, Sequence[int]], cat_dim: int) -> Tensor:
    dim, sizes = split
    return torch.cat([part.split(list(sizes), dim)[rank] for part in x], cat_dim)


# Rows that rank i sends to rank j.
ROUTED = ((2, 0, 1), (1, 3, 0), (0, 0, 4))


def routed(x: Tensor, *, world: World, axes: str) -> gradient.PendingResult:
    sizes = (ROUTED[world.rank], tuple(row[world.rank] for row in ROUTED))
    return gradient.all_to_all(x, world=world, axes=axes, split_dim=0, cat_dim=0, sizes=sizes)


CASES = [
    *gathers("all_gather", gradient.all_gather, alike_out=False),
    *gathers("replicate", gradient.replicate, alike_out=True),
    *cuts("reduce_scatter", gradient.reduce_scatter, lambda x: torch.stack(x).sum(0)),
    *cuts("take", gradient.take, lambda x: x[0]),
    Case("all_reduce", gradient.all_reduce, lambda _: SHAPE, lambda x, _: torch.stack(x).sum(0), alike_out=True),
    Case("copy", gradient.copy, lambda _: SHAPE, lambda x, r: x[r], alike_in=True),
    Case(
        "all_to_all",
        gradient.all_to_all,
        lambda _: SHAPE,
        lambda x, r: exchanged(x, r, (0, (2, 2, 2)), 1),
        {"split_dim": 0, "cat_dim": 1},
    ),
    Case(
        "all_to_all",
        gradient.all_to_all,
        lambda rank: resized(SHAPE, d2=UNEVEN[rank]),
        lambda x, r: exchanged(x, r, (1, (2, 1, 1)), 2),
        {"split_dim": 1, "cat_dim": -1, "sizes": ((2, 1, 1), UNEVEN)},
    ),
    Case(
        "all_to_all",
        gradient.all_to_all,
        lambda _: SHAPE,
        lambda x, r: exchanged(x, r, (0, (2, 2, 2)), 0),
        {"split_dim": 0, "cat_dim": 0},
    ),
    Case(
        "all_to_all",
        routed,
        lambda rank: (sum(ROUTED[rank]), 4),
        lambda x, r: torch.cat([part.split(ROUTED[rank], 0)[r] for rank, part in enumerate(x)]),
    ),
]


def product(pairs: list[tuple[Tensor, Tensor]], *, alike: bool) -> float:
    return sum(float((x * y).sum()) for x, y in (pairs[:1] if alike else pairs))


COMPILED = {case.name: case for case in CASES if case.name != "all_to_all"}
"""The last case of each collective, with uneven parts if it has parts, in a graph."""


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # of torch.compile itself
@pytest.mark.parametrize(
    "how, case",
    [
        pytest.param(how, case, id=f"{how}-{case}")
        for how in ("contiguous", "strided", "compiled")
        for case in (COMPILED.values() if how == "compiled" else CASES)
    ],
)
def test_forward_is_the_definition_and_backward_its_adjoint(how: str, case: Case) -> None:
    def main(world: World) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def call(x: Tensor) -> Tensor:
            return case.call(x, world=world, axes="rank", **case.options).wait()

        world.group("rank")  # as in every first step, which is not compiled
        x = case.input(world.rank)
        if how == "strided":
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        x.requires_grad_()
        y = (torch.compile(call, backend="aot_eager", fullgraph=True) if how == "compiled" else call)(x)
        torch.testing.assert_close(y, case.expected(case.inputs(), world.rank), rtol=1e-14, atol=1e-14)
        g = tensor(y.shape, seed=100 if case.alike_out else 100 + world.rank)
        y.backward(g)
        assert x.grad is not None
        return (y.detach(), g), (x.detach(), x.grad)

    if how == "compiled":
        torch.compiler.reset()  # each case compiles `call`, and torch stops after 8
    results = run_threads(SIZE, main)
    forward = product([pair for pair, _ in results], alike=case.alike_out)
    backward = product([pair for _, pair in results], alike=case.alike_in)
    assert forward == pytest.approx(backward, rel=1e-12)
    assert forward != 0


def test_gradients_of_all_uses_are_added_before_they_are_reduced() -> None:
    def main(world: World) -> Tensor:
        x = torch.full((2,), float(world.rank), dtype=torch.float64, requires_grad=True)
        arriving = gradient.all_gather(x, world=world, axes="rank")
        y = arriving.wait()
        assert arriving.wait() is y
        with world.record() as records:
            (y.sum() + (y * y).sum()).backward()
        assert [record.kind for record in records] == ["reduce_scatter"]
        assert x.grad is not None
        return x.grad

    # d/dx (x + x²) = 1 + 2x on each of three ranks.
    assert [grad.tolist() for grad in run_threads(SIZE, main)] == [[3.0, 3.0], [9.0, 9.0], [15.0, 15.0]]


def test_a_second_backward_through_a_kept_graph_communicates_again() -> None:
    def main(world: World) -> list[float]:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        y = gradient.copy(x, world=world, axes="rank").wait() * (world.rank + 1)
        y.backward(retain_graph=True)
        y.backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_threads(SIZE, main) == [[12.0]] * SIZE


def test_only_the_axes_named_take_part() -> None:
    def main(world: World) -> float:
        mesh = world.over(Mesh.of(a=2, b=2))
        x = torch.tensor([10.0**world.rank], requires_grad=True)
        y = gradient.all_reduce(x, world=mesh, axes="b").wait()
        gradient.copy(y, world=mesh, axes="a").wait().sum().backward()
        assert x.grad is not None
        return y.item() + x.grad.item()

    assert run_threads(4, main) == [13.0, 13.0, 1102.0, 1102.0]


def test_what_is_computed_between_start_and_wait_runs_during_both_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Compute(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            events.append("compute")
            return x * 2

        @staticmethod
        def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
            events.append("compute")
            return gradients[0] * 2

    finish = Work.wait

    def wait(work: Work) -> None:
        events.append("wait")
        finish(work)

    monkeypatch.setattr(Work, "wait", wait)
    world = TraceWorld(rank=0, mesh=Mesh.of(tp=4))
    x, other = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    with world.record() as records:
        arriving = gradient.all_gather(x, world=world, axes="tp", dim=1)
        events.append(records[-1].kind)
        beside = Compute.apply(other)
        y = arriving.wait()
        y.register_hook(lambda _: events.append("gradient of the result"))
        (y.sum() + beside.sum()).backward()
    assert [record.kind for record in records] == ["all_gather", "reduce_scatter"]
    assert events == ["all_gather", "compute", "wait", "gradient of the result", "compute", "wait"]


def test_without_a_gradient_there_is_no_graph() -> None:
    def main(world: World) -> bool:
        whole = gradient.all_gather(torch.arange(2) + world.rank, world=world, axes="rank").wait()
        assert whole.tolist() == [0, 1, 1, 2, 2, 3]
        return whole.requires_grad

    assert run_threads(SIZE, main) == [False] * SIZE


def test_second_derivatives_are_refused() -> None:
    def main(world: World) -> None:
        x = torch.ones(2, requires_grad=True)
        y = gradient.all_reduce(x, world=world, axes="rank").wait()
        [first] = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    run_threads(SIZE, main)


@pytest.mark.parametrize(
    "call, sizes, words",
    [
        (gradient.all_gather, (6, 6), r"sizes \(6, 6\) do not fit part 0 of 3, which has 6 along dim 0 of \(6, 4, 5\)"),
        (gradient.all_gather, (5, 6, 6), r"do not fit part 0 of 3"),
        (gradient.reduce_scatter, (2, 2, 3), r"do not cut dim 0 of \(6, 4, 5\) into 3 parts"),
        (gradient.take, (3, 3), r"do not cut dim 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(call: Callable[..., object], sizes: Sequence[int], words: str) -> None:
    world = TraceWorld(rank=0, mesh=Mesh.of(tp=3))
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(SHAPE), world=world, axes="tp", sizes=sizes)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_parts_along_any_dim_lie_one_after_the_other(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has one collective for such parts, and would exchange and add single tensors else."""
    seen: list[Sequence[Tensor]] = []
    collective: Callable[..., Work] = getattr(ThreadWorld, name)

    def noted(world: World, x: Any, *, into: Any, axes: str) -> Work:
        seen.append(into if name == "all_gather" else x)
        return collective(world, x, into=into, axes=axes)

    monkeypatch.setattr(ThreadWorld, name, noted)
    run_threads(
        2, lambda world: getattr(gradient, name)(tensor(SHAPE, seed=1), world=world, axes="rank", dim=dim).wait()
    )
    assert len(seen) == 2
    for first, second in seen:
        assert first.is_contiguous()
        assert second.is_contiguous()
        assert second.data_ptr() == first.data_ptr() + first.nbytes
