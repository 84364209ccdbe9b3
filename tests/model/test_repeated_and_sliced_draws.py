"""Draws in a repeated forward, and draws for a slice of the activations, equal the draws of the whole model."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwise.model.random_bits import IndexBlock
from meshwise.model.random_draws import ActivationRegion, DimSlice, RandomDraws, SampleRows
from model.drawing_models import FORMS, Block, Calling, Stack, drawn, numbers

# ---- repeated forwards -------------------------------------------------------------------------------------------


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of two micro-batches, by parameter."""
    model.zero_grad()
    draws = RandomDraws(model, seed=0)
    draws.begin(0)
    half = len(x) // 2
    for first in (0, half):
        rows = SampleRows(first, half)
        with draws.running(rows):
            loss = model(x[first : first + half]).square().sum()
        with draws.running(rows, again=True):
            loss.backward()
    draws.close()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_a_repeated_forward_draws_the_same(reentrant: bool, preserve: bool) -> None:
    def repeat(block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=preserve)
        return result

    model, x = Stack(Block(), Stack(Block(), Block())), numbers(8, 6).requires_grad_()
    expected = gradients(model, x)
    assert len(expected) == 6
    model.run = repeat
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_a_gradient_goes_through_what_the_forward_kept() -> None:
    x = torch.ones(4, 64, requires_grad=True)
    for form in ("dropout", "torch.dropout", "dropout1d", "stochastic depth"):
        result = drawn(Calling(FORMS[form]), x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, result.detach().view_as(gradient)), form


def test_an_ambiguous_repeated_call_is_refused() -> None:
    block = Block()
    model = Stack(block, block, run=lambda block, x: checkpoint(block, x, use_reentrant=False))
    with pytest.raises(ValueError, match=r"blocks.0 draws .* the first forward called it in 2 places.*checkpoint"):
        gradients(model, numbers(4, 6).requires_grad_())


def test_a_repeated_function_that_draws_outside_of_modules_is_refused() -> None:
    def repeat(_block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(functional.dropout, x, use_reentrant=False)
        return result.sin()

    with pytest.raises(ValueError, match="a function outside of any module draws random numbers"):
        gradients(Stack(Block(), Block(), run=repeat), numbers(4, 6).requires_grad_())


# ---- parts of activations ----------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A pair of layers with dropout of hidden features, of attention scores, and after."""

    def __init__(self, *, heads: slice = slice(0, 6), features: slice = slice(0, 24)) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.heads, self.features = heads, features

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What is kept of ones: before, of hidden features, of scores in two shapes, and after."""
        count = len(x)
        before = functional.dropout(x)
        self.first(x)
        hidden = functional.dropout(torch.ones(count, 5, 24)[..., self.features])
        scores = functional.dropout(torch.ones(count, 6, 5, 5)[:, self.heads])
        query = torch.zeros(count, 6, 5, 5)[:, self.heads]
        value = torch.eye(5).expand_as(query)
        attended = functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
        self.second(x)
        return before, hidden, scores, attended, functional.dropout(x)


def test_between_two_layers_a_rank_draws_its_slice_of_heads_and_features() -> None:
    x = torch.ones(3, 5, 8)
    before, hidden, scores, attended, after = drawn(Pair(), x)
    cut = {"start": 8, "size": 8}
    region = ActivationRegion(hidden=(DimSlice(-1, **cut),), scores=(DimSlice(-3, **cut),))
    model = Pair(heads=slice(2, 4), features=slice(8, 16))
    draws = RandomDraws(model, seed=0, after={"first": lambda: region, "second": ActivationRegion})
    draws.begin(0)
    with draws.running(SampleRows(0, 3)):
        parts = model(x)
    expected = (before, hidden[..., 8:16], scores[:, 2:4], attended[:, 2:4], after)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, expected, strict=True))


def test_scores_with_heads_among_the_samples_are_the_slice_of_heads() -> None:
    parts: list[Any] = []

    def ask(x: Tensor) -> Tensor:
        parts.append(draws.part((3 * 2, 5, 5), scores=True))
        return x

    model = Calling(ask)
    draws = RandomDraws(model, seed=0, before={"": lambda: ActivationRegion(scores=(DimSlice(-3, start=10, size=10),))})
    with draws.running(SampleRows(4, 3)):
        model(torch.ones(3))
    assert parts == [(IndexBlock((3, 2, 5, 5), (4, 2, 0, 0)), False)]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_parts_of_a_sequence_are_drawn_by_their_number(part: int) -> None:
    model = nn.Sequential(nn.Identity(), Calling(functional.dropout))
    x = torch.ones(3, 12, 8)
    whole = drawn(model, x)
    draws = RandomDraws(
        model, seed=0, before={"1": lambda: ActivationRegion(hidden=(DimSlice(-2, start=4 * part, size=4),))}
    )
    draws.begin(0)
    with draws.running(SampleRows(0, 3)):
        ours = model(x[:, 4 * part : 4 * part + 4])
    assert torch.equal(ours, whole[:, 4 * part : 4 * part + 4])


def test_samples_of_another_share_are_drawn_by_their_number() -> None:
    model, x = nn.Sequential(Calling(functional.dropout)), torch.ones(2, 8)
    draws = RandomDraws(model, seed=0, before={"0": lambda: ActivationRegion(rank_offset=2)})
    draws.begin(0)
    with draws.running(SampleRows(5, 2, further=lambda shares: SampleRows(5 + 3 * shares, 2))):
        ours = model(x)
    assert torch.equal(ours, drawn(model, x, rows=SampleRows(11, 2)))


def test_a_repeated_forward_draws_in_the_region_where_it_was() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.core, self.second = nn.Identity(), nn.Dropout(0.5), nn.Identity()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(checkpoint(self.core, self.first(x) * self.scale, use_reentrant=False).sin())
            return result

    model, x = Halves(), torch.ones(4, 16)
    region = ActivationRegion(hidden=(DimSlice(-1, start=16, size=16),))
    draws = RandomDraws(model, seed=0, after={"first": lambda: region, "second": ActivationRegion})
    draws.begin(0)
    with draws.running(SampleRows(0, 4)):
        result = model(x)
    with draws.running(SampleRows(0, 4), again=True):
        result.sum().backward()
    assert model.scale.grad is not None
    kept = result.detach() > 0
    torch.testing.assert_close(model.scale.grad, (kept * 2 * math.cos(2)).sum(0).to(torch.float32))
