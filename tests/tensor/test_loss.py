"""Logits split over the vocabulary look whole, and their cross-entropy is torch's without ever being whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.base.mesh import Mesh, even_split
from meshwise.comm.api.world import World
from meshwise.tensor.core.vocab_parallel import DimShards, SplitLogits
from meshwise.testing import run

CLASSES, RANKS = 11, 3
SIZES = tuple(stop - start for start, stop in even_split(CLASSES, RANKS))


def split_logits(world: World, whole: Tensor, *, dim: int = -1) -> tuple[Tensor, SplitLogits]:
    """This rank's part as a leaf, and the logits made of it."""
    vocabulary = DimShards(world.over(Mesh.of(tp=RANKS)), ("tp",), SIZES)
    local = whole.split(SIZES, dim)[world.rank].to(world.device, copy=True).requires_grad_()
    return local, SplitLogits(local, vocabulary=vocabulary, dim=dim)


def same_as_whole(fn: Callable[[Tensor], Tensor], *, shape: tuple[int, ...] = (4, 5, CLASSES), dim: int = -1) -> None:
    """Assert that `fn` of split logits gives every rank the value and its part of the gradient of the whole ones."""
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = fn(whole)
    expected.backward(torch.ones_like(expected))
    gradient = whole.grad
    assert gradient is not None

    def main(world: World) -> None:
        local, logits = split_logits(world, whole.detach(), dim=dim)
        found = fn(logits)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        found.backward(torch.ones_like(found))
        assert local.grad is not None
        wanted = gradient.split(SIZES, dim)[world.rank]
        torch.testing.assert_close(local.grad.cpu(), wanted, rtol=1e-12, atol=1e-12, equal_nan=True)

    run(RANKS, main)


def cross_entropy(x: Tensor, targets: Tensor, *, weight: Tensor | None = None, **options: Any) -> Tensor:
    """torch's, with targets and weight on the device of the logits."""
    weight = None if weight is None else weight.to(x.device)
    return functional.cross_entropy(x, targets.to(x.device), weight=weight, **options)


TARGETS = torch.randint(0, CLASSES, (20,), generator=torch.Generator().manual_seed(3))
SOME = TARGETS.masked_fill(torch.arange(20) % 3 == 0, -100)
WEIGHT = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"weight": WEIGHT},
        {"weight": WEIGHT, "label_smoothing": 0.3},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_cross_entropy_is_that_of_whole_logits(options: dict[str, Any], reduction: str) -> None:
    same_as_whole(lambda x: cross_entropy(x.view(-1, CLASSES), SOME, reduction=reduction, **options))


def test_the_ignored_class_may_be_any_number() -> None:
    same_as_whole(lambda x: cross_entropy(x.view(-1, CLASSES), TARGETS, ignore_index=int(TARGETS[0])))


def test_classes_may_lie_in_dim_1_as_torch_wants_them() -> None:
    same_as_whole(lambda x: cross_entropy(x.transpose(1, 2), SOME.view(4, 5)))
    same_as_whole(lambda x: cross_entropy(x.permute(0, 2, 1), SOME.view(4, 5), reduction="none"))
    same_as_whole(lambda x: nn.CrossEntropyLoss()(x, SOME.view(4, 5).to(x.device)), shape=(4, CLASSES, 5), dim=1)
    same_as_whole(lambda x: cross_entropy(x, SOME[1]), shape=(CLASSES,))


def test_probabilities_as_targets_use_whole_logits() -> None:
    likely = torch.softmax(torch.randn(20, CLASSES, dtype=torch.float64), -1)
    same_as_whole(lambda x: cross_entropy(x.view(-1, CLASSES), likely))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :-1],
        lambda x: x[..., 1:, :].contiguous(),
        lambda x: x[2],
        lambda x: x[:, None],
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[torch.arange(20).view(4, 5) % 2 == 0],
        lambda x: x.flatten(0, 1),
        lambda x: x.reshape(2, -1, CLASSES),
        lambda x: x.view(torch.Size((20, CLASSES))),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: (x / 2).float().double(),
        lambda x: x.flatten(1),
        lambda x: x[..., :3],
        lambda x: x.softmax(-1),
        lambda x: x + x,
    ],
)
def test_views_and_functions_of_logits_are_those_of_whole_ones(view: Callable[[Tensor], Tensor]) -> None:
    def fn(x: Tensor) -> Tensor:
        seen = view(x)
        whole = seen.whole() if isinstance(seen, SplitLogits) else seen
        assert seen.shape == whole.shape
        assert seen.dtype == whole.dtype
        return whole.sin()

    same_as_whole(fn)


def test_what_leaves_the_vocabulary_alone_stays_split() -> None:
    def main(world: World) -> None:
        _, logits = split_logits(world, torch.randn(4, 5, CLASSES))
        with world.record() as records:
            seen = logits.float()[:, :-1].contiguous().view(-1, CLASSES) / 2
        assert isinstance(seen, SplitLogits)
        assert seen.local.shape == (16, SIZES[world.rank])
        assert seen.requires_grad
        assert not records

    run(RANKS, main)


def test_logits_that_are_written_to_are_whole_from_then_on() -> None:
    same_as_whole(lambda x: masked(x + 0) if not isinstance(x, SplitLogits) else masked(x))

    def main(world: World) -> None:
        _, logits = split_logits(world, torch.zeros(4, CLASSES))
        with pytest.raises(RuntimeError, match="would write into a view or conversion of split logits"):
            logits.float().fill_(1.0)

    run(RANKS, main)


def masked(x: Tensor) -> Tensor:
    x[..., 3] = -1e4
    return cross_entropy(x.view(-1, CLASSES), SOME, reduction="sum")


class Largest(TorchDispatchMode):
    """The most elements that any tensor of the operations inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_no_rank_ever_has_whole_logits(options: dict[str, Any]) -> None:
    tokens, classes = 64, 300

    def main(world: World) -> None:
        local = torch.randn(tokens, classes // RANKS, device=world.device, requires_grad=True)
        vocabulary = DimShards(world.over(Mesh.of(tp=RANKS)), ("tp",), (classes // RANKS,) * RANKS)
        targets = torch.arange(tokens, device=world.device)
        with Largest() as largest:
            loss = functional.cross_entropy(SplitLogits(local, vocabulary=vocabulary).float(), targets, **options)
            loss.backward()
        assert largest.elements == local.numel()

    run(RANKS, main)


@pytest.mark.threads("on a GPU an assertion of the device ends the process")
def test_a_target_that_is_no_class_is_an_error() -> None:
    def main(world: World) -> None:
        _, logits = split_logits(world, torch.zeros(2, CLASSES))
        with pytest.raises(IndexError, match="target 11 is out of bounds for 11 classes"):
            functional.cross_entropy(logits, torch.tensor([0, 11]))

    run(RANKS, main)


def test_targets_of_another_number_are_an_error() -> None:
    def main(world: World) -> None:
        _, logits = split_logits(world, torch.zeros(2, CLASSES))
        with pytest.raises(ValueError, match="batch_size"):
            functional.cross_entropy(logits, torch.tensor([0, 1, 2], device=world.device))

    run(RANKS, main)
