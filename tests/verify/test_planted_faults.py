"""Every fault that a parallel engine is known for is caught, and named.

The faults are planted from outside, by a world that delivers what a faulty engine would have: between the engine and
the world of threads stands `Faulty`, which passes every call on and lets a fault change what comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.base.mesh import Mesh
from meshwise.comm.api.split_and_reduce import Parts
from meshwise.comm.api.world import Axes, Work, World
from meshwise.engine.parallelize import Options
from meshwise.reference.gpt import IGNORED, next_token_loss
from meshwise.testing import run
from meshwise.verify import Divergence, Report, verify

VOCABULARY, CONTEXT, WIDTH = 16, 4, 8


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.inner, name)(*args)


Passing = type(
    "Passing", (World,), {name: _passed_on(name) for name in (*World.__abstractmethods__, "_move") if name != "over"}
)


class Faulty(Passing):  # type: ignore[misc, valid-type]
    """A world whose reductions and gathers may be tampered with."""

    def __init__(self, inner: World) -> None:
        super().__init__(rank=inner.rank, mesh=inner.mesh, device=inner.device, flight_recorder=inner.flight_recorder)
        self.inner = inner

    def over(self, mesh: Mesh) -> World:
        return type(self)(self.inner.over(mesh))

    def all_reduce(self, x: Tensor, *, axes: Axes, op: str = "sum") -> Work:
        if is_totals(x):
            self.of_totals(x)
        elif is_gradient(x):
            return self.gradient(x, axes)
        return super().all_reduce(x, axes=axes, op=op)  # type: ignore[no-any-return]

    def of_totals(self, x: Tensor) -> None:
        """What this rank adds to the sums of a step: loss, count, squared norm, digest."""

    def gradient(self, x: Tensor, axes: Axes) -> Work:
        """The reduction of a unit's gradients."""
        return super().all_reduce(x, axes=axes)  # type: ignore[no-any-return]


def is_totals(x: Tensor) -> bool:
    return x.shape == (4,)


def is_gradient(x: Tensor) -> bool:
    return x.ndim == 1 and x.numel() > 4


def has_embedding(x: Tensor) -> bool:
    """Whether this is the buffer of the embedding, which is a unit by itself."""
    return x.numel() == VOCABULARY * WIDTH


class ReducedTwice(Faulty):
    """The unit of the embedding is reduced twice."""

    def gradient(self, x: Tensor, axes: Axes) -> Work:
        if has_embedding(x):
            super().gradient(x, axes).wait()
        return super().gradient(x, axes)


class NormCountedTwice(Faulty):
    """Both ranks add the whole squared norm."""

    def of_totals(self, x: Tensor) -> None:
        x[2] *= 2


class RankSkipped(Faulty):
    """The gradients of rank 1 are left out."""

    def gradient(self, x: Tensor, axes: Axes) -> Work:
        if self.rank == 1:
            x.zero_()
        return super().gradient(x, axes)


class TiedCountedTwice(Faulty):
    """The gradient of the tied matrix is added once for each of its two names."""

    def gradient(self, x: Tensor, axes: Axes) -> Work:
        super().gradient(x, axes).wait()
        if has_embedding(x):
            x *= 2
        return Work()


class Stale(Faulty):
    """Rank 1 goes on with the embedding it had before the update."""

    def all_gather(self, x: Tensor, *, into: Parts, axes: Axes) -> Work:
        before = into.clone() if isinstance(into, Tensor) else None
        super().all_gather(x, into=into, axes=axes).wait()
        if self.rank == 1 and before is not None and before.is_floating_point() and has_embedding(before):
            assert isinstance(into, Tensor)
            into.copy_(before)
        return Work()


class Tied(nn.Module):
    """A language model of one layer, whose head is the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (6, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, 1:] = IGNORED
        drawn.append((tokens[:, :-1], targets))
    return drawn


def check(
    world: type[Faulty] | None, plan: str, loss: Any = next_token_loss, dtype: torch.dtype = torch.float64
) -> Report:
    def main(threads: World) -> Report:
        inner = threads if world is None else world(threads)
        return verify(Tied, loss, batches(), plan, world=inner, dtype=dtype, lr=1e-2, options=Options(clip_norm=0.01))

    report: Report = run(2, main)[0]
    return report


def first(report: Report) -> Divergence:
    assert not report.ok
    assert report.first is not None
    assert "is NOT the same model" in report.verdict
    assert str(report.first) in str(report)
    return report.first


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1"])
@pytest.mark.parametrize("world", [None, Faulty])
def test_without_a_fault_the_report_is_ok(world: type[Faulty] | None, plan: str) -> None:
    report = check(world, plan)
    assert report.ok, str(report)


def test_a_gradient_that_is_reduced_twice() -> None:
    found = first(check(ReducedTwice, "dp=2"))
    assert (found.what, found.step) == ("the gradient of embedding.weight", 1)
    assert found.detail == "it is 2 times the expected value"
    assert found.module == "embedding"


def test_a_norm_that_is_counted_twice() -> None:
    found = first(check(NormCountedTwice, "dp=2"))
    assert (found.what, found.step, found.module) == ("the gradient norm", 1, None)
    assert "(1.41421 times as much)" in found.detail


def test_a_rank_whose_gradients_are_left_out() -> None:
    report = check(RankSkipped, "dp=2")
    found = first(report)
    assert (found.what, found.step, found.module) == ("the gradient of layers.1.weight", 1, "layers.1")
    assert all(line.gradient is not None and line.gradient.over for line in report.parameters)


def test_a_tied_parameter_that_is_counted_twice() -> None:
    report = check(TiedCountedTwice, "dp=2")
    found = first(report)
    assert (found.what, found.step) == ("the gradient of embedding.weight", 1)
    assert found.detail == "it is 2 times the expected value"


def test_a_parameter_that_is_stale_on_one_rank() -> None:
    found = first(check(Stale, "dp=2 zero=1"))
    assert (found.what, found.step) == ("the value of embedding.weight on rank 1", 1)
    assert found.module == "embedding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "world, plan, what",
    [
        (ReducedTwice, "dp=2", "the gradient of embedding.weight"),
        (RankSkipped, "dp=2", "the gradient of layers.1.weight"),
        (NormCountedTwice, "dp=2", "the gradient norm"),
        (Stale, "dp=2 zero=1", "the value of embedding.weight on rank 1"),
    ],
)
def test_what_rounding_explains_does_not_hide_a_fault(
    world: type[Faulty], plan: str, what: str, dtype: torch.dtype
) -> None:
    assert first(check(world, plan, dtype=dtype)).what == what


def mean_and_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A mean that says it is a sum over one: its mean over micro-batches is a mean of means."""
    total, count = next_token_loss(output, batch)
    return total / count, 1


def rows_for_tokens(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A mean over tokens that claims to be a mean over rows: rows with few tokens count as much as others."""
    total, count = next_token_loss(output, batch)
    return total / count * len(batch[0]), len(batch[0])


def test_a_mean_of_means_that_counts_micro_batches() -> None:
    found = first(check(None, "dp=2", loss=mean_and_one))
    assert (found.what, found.step) == ("the count of the loss", 1)
    assert found.detail == "it is 2, expected is 1 (2 times as much)"


def test_a_mean_of_means_over_ragged_rows() -> None:
    found = first(check(None, "dp=2", loss=rows_for_tokens))
    assert (found.what, found.step) == ("the loss", 1)
