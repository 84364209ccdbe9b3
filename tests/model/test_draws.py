"""What a model draws is a function of seed, step, sample, place and element, and not of who draws it, or how often."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwise.model.bits import Part
from meshwise.model.draws import Cut, Draws, Region, Rows


def attention(q: Tensor, *, dropout_p: float = 0.4, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p, **options)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, train=True),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.4, inplace=True),
    "dropout1d": lambda x: functional.dropout1d(x[:, :, None], 0.4),
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None], 0.4),
    "dropout3d": lambda x: functional.dropout3d(x[:, :, None, None, None], 0.4),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x[:, :, None], 0.4, training=True),
    "attention": lambda x: attention(x.view(-1, 2, 4, 2)),
    "bernoulli of a tensor": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x, 0.4),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "stochastic depth": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.6),
    "rand": lambda x: torch.rand(len(x), 3, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "randn": lambda x: torch.randn(len(x), 3, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "gumbel_softmax": functional.gumbel_softmax,
}


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Block(nn.Module):
    """A residual block that draws three times, twice with the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.dropout(self.layer(self.dropout(x))), 0.4, self.training)


class Stack(nn.Module):
    """Blocks, each run by `run(block, x)`."""

    def __init__(
        self, *blocks: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def drawn(model: nn.Module, x: Any, *, rows: Rows | None = None, step: int = 0, seed: int = 0) -> Any:
    """What a model makes of x, with draws of its own."""
    draws = Draws(model, seed=seed)
    draws.begin(step)
    with draws.running(rows or Rows(0, len(x))):
        result = model(x)
    draws.close()
    return result


# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_any_samples_alone_are_drawn_as_among_the_others(form: str) -> None:
    model, x = Calling(FORMS[form]), numbers(12, 16)
    together = drawn(model, x)
    for first, count in ((0, 12), (0, 5), (5, 7), (11, 1)):
        alone = drawn(model, x[first : first + count], rows=Rows(first, count))
        torch.testing.assert_close(alone, together[first : first + count], rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_other_samples_steps_and_seeds_are_drawn_anew(form: str) -> None:
    model, x = Calling(FORMS[form]), numbers(12, 16)
    result = drawn(model, x)
    others = (drawn(model, x, rows=Rows(12, 12)), drawn(model, x, step=1), drawn(model, x, seed=1))
    assert not any(torch.equal(result, other) for other in others)
    assert torch.equal(result, drawn(model, x))


@pytest.mark.parametrize("form", FORMS)
def test_no_draw_moves_torchs_own_generator(form: str) -> None:
    before = torch.get_rng_state()
    drawn(Calling(FORMS[form]), numbers(12, 16))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_with_a_generator_of_its_own_is_left_alone() -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(5))

    x = numbers(3, 4)
    assert torch.equal(drawn(Calling(draw), x), draw(x))


def test_a_tensor_without_samples_is_drawn_once_for_all_of_them() -> None:
    model = Calling(lambda x: x + functional.dropout(torch.ones(1, 7, 5, dtype=x.dtype), 0.5))
    x = torch.zeros(6, 7, 5, dtype=torch.float64)
    together = drawn(model, x)
    assert torch.equal(together[0], together[5])
    assert torch.equal(drawn(model, x[2:5], rows=Rows(2, 3)), together[2:5])


def test_flattened_samples_are_drawn_as_unflattened_ones() -> None:
    x = torch.ones(6, 7, 5)
    flat = drawn(Calling(lambda x: functional.dropout(x.flatten(0, 1), 0.5).view_as(x)), x)
    assert torch.equal(flat, drawn(Calling(lambda x: functional.dropout(x, 0.5)), x))


@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_may_lie_along_dim_1_where_a_module_says_so(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=torch.float64)
    other = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    x = numbers(6, 6, 8)
    expected = drawn(layer, x)
    for first, count in ((0, 6), (2, 3), (5, 1)):
        part = x[first : first + count]
        result = drawn(other, part if batch_first else part.transpose(0, 1), rows=Rows(first, count))
        result = result if batch_first else result.transpose(0, 1)
        torch.testing.assert_close(result, expected[first : first + count], rtol=0, atol=1e-14)


def test_attention_returns_its_weights_only_when_asked() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    model = Calling(lambda x: attention(x, x, x, need_weights=True))
    quiet = Calling(lambda x: attention(x, x, x, need_weights=False))
    (output, weights), (same, none) = drawn(model, torch.ones(3, 4, 8)), drawn(quiet, torch.ones(3, 4, 8))
    assert weights.shape == (3, 4, 4)
    assert none is None
    assert torch.equal(output, same)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs_own_without_dropout_and_on_average_with_it(causal: bool) -> None:
    q = numbers(3, 2, 5, 4)
    options: dict[str, Any] = {"is_causal": causal, "scale": 0.3}
    without = drawn(Calling(lambda q: attention(q, dropout_p=0.0, **options)), q)
    expected = attention(q, dropout_p=0.0, **options)
    assert torch.equal(without, expected)
    dropping = Calling(lambda q: attention(q, dropout_p=0.1, **options))
    many = torch.stack([drawn(dropping, q, step=step) for step in range(300)])
    torch.testing.assert_close(many.mean(0), expected, rtol=0, atol=0.15)


def test_eval_mode_draws_nothing() -> None:
    model, x = Stack(Block(), Block()).eval(), numbers(4, 6)
    assert torch.equal(drawn(model, x), model(x))


def test_dropout_keeps_and_scales_as_torchs_does() -> None:
    x = torch.ones(64, 4096)
    result = drawn(Calling(lambda x: functional.dropout(x, 0.1)), x)
    assert result.unique().tolist() == functional.dropout(x, 0.1).unique().tolist()
    assert abs((result > 0).double().mean() - 0.9) < 4 * math.sqrt(0.09 / x.numel())


# ---- places ------------------------------------------------------------------------------------------------------


def test_every_place_is_drawn_anew() -> None:
    shared = nn.Dropout(0.5)
    model = Calling(lambda x: torch.stack([shared(x), shared(x), functional.dropout(x), functional.dropout(x)]))
    model.add_module("shared", shared)
    masks = drawn(model, torch.ones(4, 64))
    assert len({mask.numpy().tobytes() for mask in masks}) == 4


def test_a_module_called_twice_is_two_places_and_so_are_those_inside_it() -> None:
    block = Block()
    nn.init.eye_(block.layer.weight)
    once, twice = drawn(block, torch.ones(4, 6).double()), drawn(Stack(block, block), torch.ones(4, 6).double())
    assert not torch.equal(drawn(block, once), twice)


def test_a_part_of_the_model_run_by_itself_draws_as_within_it() -> None:
    model, x = Stack(Block(), Block()), numbers(4, 6)
    draws = Draws(model, seed=0)
    draws.begin(0)
    with draws.running(Rows(0, 4)):
        whole = model(x)
    with draws.running(Rows(0, 4)):
        half = model.blocks[0](x)
    with draws.running(Rows(0, 4)):
        assert torch.equal(model.blocks[1](half), whole)


def test_an_evaluation_in_between_changes_nothing() -> None:
    model, x = Stack(Block(), Block()), numbers(4, 6)
    draws = Draws(model, seed=0)
    results = []
    for _ in range(2):
        draws.begin(0)
        with draws.running(Rows(0, 4)):
            results.append(model(x))
        draws.finish()
        model(x)
    assert torch.equal(*results)


def test_an_exception_in_the_forward_leaves_no_call_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        if len(x) == 3:
            raise RuntimeError("no")
        return functional.dropout(x)

    model, x = Stack(Calling(fail)), numbers(4, 6)
    draws = Draws(model, seed=0)
    draws.begin(0)
    with pytest.raises(RuntimeError, match="no"), draws.running(Rows(0, 3)):
        model(x[:3])
    with draws.running(Rows(0, 4)):
        result = model(x)
    assert torch.equal(result, drawn(model, x))


# ---- repeated forwards -------------------------------------------------------------------------------------------


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of two micro-batches, by parameter."""
    model.zero_grad()
    draws = Draws(model, seed=0)
    draws.begin(0)
    half = len(x) // 2
    for first in (0, half):
        rows = Rows(first, half)
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


def test_a_repeated_call_that_cannot_be_told_from_another_is_refused() -> None:
    block = Block()
    model = Stack(block, block, run=lambda block, x: checkpoint(block, x, use_reentrant=False))
    with pytest.raises(ValueError, match=r"blocks.0 draws .* was called in 2 places of it.*checkpoint the whole"):
        gradients(model, numbers(4, 6).requires_grad_())


def test_a_repeated_function_that_draws_outside_of_modules_is_refused() -> None:
    def repeat(_block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(functional.dropout, x, use_reentrant=False)
        return result.sin()

    with pytest.raises(ValueError, match="a function that is no module draws random numbers"):
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
    region = Region(hidden=(Cut(-1, **cut),), scores=(Cut(-3, **cut),))
    model = Pair(heads=slice(2, 4), features=slice(8, 16))
    draws = Draws(model, seed=0, after={"first": lambda: region, "second": Region})
    draws.begin(0)
    with draws.running(Rows(0, 3)):
        parts = model(x)
    expected = (before, hidden[..., 8:16], scores[:, 2:4], attended[:, 2:4], after)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, expected, strict=True))


def test_scores_with_heads_among_the_samples_are_the_slice_of_heads() -> None:
    parts: list[Any] = []

    def ask(x: Tensor) -> Tensor:
        parts.append(draws.part((3 * 2, 5, 5), scores=True))
        return x

    model = Calling(ask)
    draws = Draws(model, seed=0, before={"": lambda: Region(scores=(Cut(-3, start=10, size=10),))})
    with draws.running(Rows(4, 3)):
        model(torch.ones(3))
    assert parts == [(Part((3, 2, 5, 5), (4, 2, 0, 0)), False)]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_parts_of_a_sequence_are_drawn_by_their_number(part: int) -> None:
    model = nn.Sequential(nn.Identity(), Calling(functional.dropout))
    x = torch.ones(3, 12, 8)
    whole = drawn(model, x)
    draws = Draws(model, seed=0, before={"1": lambda: Region(hidden=(Cut(-2, start=4 * part, size=4),))})
    draws.begin(0)
    with draws.running(Rows(0, 3)):
        ours = model(x[:, 4 * part : 4 * part + 4])
    assert torch.equal(ours, whole[:, 4 * part : 4 * part + 4])


def test_samples_of_another_share_are_drawn_by_their_number() -> None:
    model, x = nn.Sequential(Calling(functional.dropout)), torch.ones(2, 8)
    draws = Draws(model, seed=0, before={"0": lambda: Region(shares=2)})
    draws.begin(0)
    with draws.running(Rows(5, 2, further=lambda shares: Rows(5 + 3 * shares, 2))):
        ours = model(x)
    assert torch.equal(ours, drawn(model, x, rows=Rows(11, 2)))


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
    region = Region(hidden=(Cut(-1, start=16, size=16),))
    draws = Draws(model, seed=0, after={"first": lambda: region, "second": Region})
    draws.begin(0)
    with draws.running(Rows(0, 4)):
        result = model(x)
    with draws.running(Rows(0, 4), again=True):
        result.sum().backward()
    assert model.scale.grad is not None
    kept = result.detach() > 0
    torch.testing.assert_close(model.scale.grad, (kept * 2 * math.cos(2)).sum(0).to(torch.float32))


# ---- when there is nothing to draw, and what cannot be drawn -----------------------------------------------------


def test_a_model_that_draws_nothing_is_left_alone_until_it_draws() -> None:
    dropout = nn.Dropout(0.0)
    model, x = Stack(dropout), torch.ones(4, 64)
    draws = Draws(model, seed=0)

    def step(number: int) -> Tensor:
        draws.begin(number)
        with draws.running(Rows(0, 4)):
            result: Tensor = model(x)
        draws.finish()
        return result

    step(0)
    assert not model._forward_hooks
    assert not dropout._forward_pre_hooks
    step(1)
    dropout.p = 0.5
    with pytest.warns(UserWarning, match="the model drew random numbers in step 2, as it had not before"):
        step(2)
    assert torch.equal(step(3), drawn(model, x, step=3))


def test_what_is_drawn_from_torchs_own_generator_is_named_once() -> None:
    model = Stack(Calling(lambda x: x[torch.randperm(len(x))]))
    draws = Draws(model, seed=0)
    draws.begin(0)
    with draws.running(Rows(0, 4)), pytest.warns(UserWarning, match=r"aten.randperm.default in blocks.0 draws from"):
        model(numbers(4, 6))
    with draws.running(Rows(0, 4)):
        model(numbers(4, 6))
    assert draws.unknown == {"aten.randperm.default in blocks.0"}
    assert draws.drew


def test_local_draws_are_torchs_own_and_the_same_again_for_the_same_part() -> None:
    model, x = Stack(Block(), Block()), numbers(8, 6)
    draws = Draws(model, seed=0, local=True)
    before = torch.get_rng_state()

    def run(rows: Rows) -> Tensor:
        draws.begin(0)
        with draws.running(rows):
            result: Tensor = model(x[: rows.count])
        return result

    assert torch.equal(run(Rows(0, 4)), run(Rows(0, 4)))
    assert not torch.equal(run(Rows(0, 4)), run(Rows(4, 4)))
    torch.set_rng_state(before)
