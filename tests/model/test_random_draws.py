"""Draws are a function of seed, step, sample, place and element, and of nothing else."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwise.model.random_draws import RandomDraws, SampleRows
from model.drawing_models import FORMS, Block, Calling, Stack, attention, drawn, numbers

# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_any_samples_alone_are_drawn_as_among_the_others(form: str) -> None:
    model, x = Calling(FORMS[form]), numbers(12, 16)
    together = drawn(model, x)
    for first, count in ((0, 12), (0, 5), (5, 7), (11, 1)):
        alone = drawn(model, x[first : first + count], rows=SampleRows(first, count))
        torch.testing.assert_close(alone, together[first : first + count], rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_other_samples_steps_and_seeds_have_other_draws(form: str) -> None:
    model, x = Calling(FORMS[form]), numbers(12, 16)
    result = drawn(model, x)
    others = (drawn(model, x, rows=SampleRows(12, 12)), drawn(model, x, step=1), drawn(model, x, seed=1))
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
    assert torch.equal(drawn(model, x[2:5], rows=SampleRows(2, 3)), together[2:5])


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
        result = drawn(other, part if batch_first else part.transpose(0, 1), rows=SampleRows(first, count))
        result = result if batch_first else result.transpose(0, 1)
        torch.testing.assert_close(result, expected[first : first + count], rtol=0, atol=1e-14)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_between_recurrent_layers_samples_lie_along_dim_1(kind: type[nn.RNNBase], batch_first: bool) -> None:
    layers = kind(5, 4, 3, dropout=0.4, batch_first=batch_first, dtype=torch.float64)  # type: ignore[arg-type]
    x = numbers(6, 12, 5)  # as many tokens as two times the samples

    def run(first: int, count: int) -> Tensor:
        part = x[first : first + count]
        output = drawn(layers, part if batch_first else part.transpose(0, 1), rows=SampleRows(first, count))[0]
        return output if batch_first else output.transpose(0, 1)  # type: ignore[no-any-return]

    for first, count in ((0, 6), (0, 4), (2, 3), (5, 1)):
        torch.testing.assert_close(run(first, count), run(0, 6)[first : first + count], rtol=0, atol=1e-14)


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


def test_attention_with_dropout_hides_what_a_mask_of_booleans_hides() -> None:
    q, x = numbers(3, 2, 5, 4), numbers(3, 2, 5, 4)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    seen[2], added[2] = False, -torch.inf  # a row that sees nothing

    def attended(mask: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return drawn(Calling(lambda q: attention(q, attn_mask=mask)), of)  # type: ignore[no-any-return]

    assert torch.equal(attended(seen, q), attended(added, q))
    x[:, :, 0] = q[:, :, 0]
    assert torch.equal(attended(seen, q)[:, :, 0], attended(seen, x)[:, :, 0])  # the first sees itself alone


def test_eval_mode_draws_nothing() -> None:
    model, x = Stack(Block(), Block()).eval(), numbers(4, 6)
    assert torch.equal(drawn(model, x), model(x))


def test_dropout_keeps_and_scales_as_torchs_does() -> None:
    x = torch.ones(64, 4096)
    result = drawn(Calling(lambda x: functional.dropout(x, 0.1)), x)
    assert result.unique().tolist() == functional.dropout(x, 0.1).unique().tolist()
    assert abs((result > 0).double().mean() - 0.9) < 4 * math.sqrt(0.09 / x.numel())


# ---- places ------------------------------------------------------------------------------------------------------


def test_every_place_has_its_own_draws() -> None:
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
    draws = RandomDraws(model, seed=0)
    draws.begin(0)
    with draws.running(SampleRows(0, 4)):
        whole = model(x)
    with draws.running(SampleRows(0, 4)):
        half = model.blocks[0](x)
    with draws.running(SampleRows(0, 4)):
        assert torch.equal(model.blocks[1](half), whole)


def test_an_evaluation_in_between_changes_nothing() -> None:
    model, x = Stack(Block(), Block()), numbers(4, 6)
    draws = RandomDraws(model, seed=0)
    results = []
    for _ in range(2):
        draws.begin(0)
        with draws.running(SampleRows(0, 4)):
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
    draws = RandomDraws(model, seed=0)
    draws.begin(0)
    with pytest.raises(RuntimeError, match="no"), draws.running(SampleRows(0, 3)):
        model(x[:3])
    with draws.running(SampleRows(0, 4)):
        result = model(x)
    assert torch.equal(result, drawn(model, x))


# ---- when there is nothing to draw, and what cannot be drawn -----------------------------------------------------


def test_a_model_that_draws_nothing_is_left_alone_until_it_draws() -> None:
    dropout = nn.Dropout(0.0)
    model, x = Stack(dropout), torch.ones(4, 64)
    draws = RandomDraws(model, seed=0)

    def step(number: int) -> Tensor:
        draws.begin(number)
        with draws.running(SampleRows(0, 4)):
            result: Tensor = model(x)
        draws.finish()
        return result

    step(0)
    assert not model._forward_hooks
    assert not dropout._forward_pre_hooks
    step(1)
    dropout.p = 0.5
    with pytest.warns(UserWarning, match="the model drew random numbers in step 2 for the first time"):
        step(2)
    assert torch.equal(step(3), drawn(model, x, step=3))


def test_what_is_drawn_from_torchs_own_generator_is_named_once() -> None:
    model = Stack(Calling(lambda x: x[torch.randperm(len(x))]))
    draws = RandomDraws(model, seed=0)
    draws.begin(0)
    with (
        draws.running(SampleRows(0, 4)),
        pytest.warns(UserWarning, match=r"aten.randperm.default in blocks.0 draws from"),
    ):
        model(numbers(4, 6))
    with draws.running(SampleRows(0, 4)):
        model(numbers(4, 6))
    assert draws.unknown == {"aten.randperm.default in blocks.0"}
    assert draws.drew


def test_local_draws_are_torchs_own_and_the_same_again_for_the_same_part() -> None:
    model, x = Stack(Block(), Block()), numbers(8, 6)
    draws = RandomDraws(model, seed=0, local=True)
    before = torch.get_rng_state()

    def run(rows: SampleRows) -> Tensor:
        draws.begin(0)
        with draws.running(rows):
            result: Tensor = model(x[: rows.count])
        return result

    assert torch.equal(run(SampleRows(0, 4)), run(SampleRows(0, 4)))
    assert not torch.equal(run(SampleRows(0, 4)), run(SampleRows(4, 4)))
    assert not torch.equal(run(SampleRows(0, 4)), drawn(model, x[:4]))
    assert torch.equal(torch.get_rng_state(), before)


# ---- after the first step ----------------------------------------------------------------------------------------


class Skipping(Stack):
    """A stack that leaves out its last block in step 0, and draws between the blocks in every step."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.step else self.blocks[:-1]:  # type: ignore[attr-defined,unused-ignore]
            x = functional.dropout(block(x), 0.3)
        return x

    step = 0


MODELS: dict[str, Any] = {
    "blocks": lambda: Stack(Block(), nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh()), Block()),
    "one block twice": lambda: Stack(Block(), Block(), run=lambda block, x: block(block(x))),
    "a block that step 0 skips": lambda: Skipping(Block(), Block(), Stack(Block())),
    "attention": lambda: Stack(Calling(lambda x: x + attention(x.view(-1, 1, 2, 3)).view_as(x)), Block()),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_later_steps_draw_by_fewer_hooks_what_the_first_would(model: Any) -> None:
    model, x = model(), numbers(8, 6)
    draws = RandomDraws(model, seed=0)
    for number in range(4):
        model.step = number
        draws.begin(number)
        parts = []
        for first in (0, 4):
            with draws.running(SampleRows(first, 4)):
                parts.append(model(x[first : first + 4]))
        draws.finish()
        # Products of 4 and of 8 rows differ in the last bits on some machines.
        torch.testing.assert_close(torch.cat(parts), drawn(model, x, step=number), rtol=1e-12, atol=1e-12)
        quiet = [name for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
        assert not any(model.get_submodule(name)._forward_pre_hooks for name in quiet)


def test_a_module_that_draws_for_the_first_time_later_is_noticed() -> None:
    quiet = nn.Dropout(0.0)
    model, x = Stack(Block(), quiet), numbers(4, 6)
    draws = RandomDraws(model, seed=0)

    def step(number: int) -> Tensor:
        draws.begin(number)
        with draws.running(SampleRows(0, 4)):
            result: Tensor = model(x)
        draws.finish()
        return result

    assert torch.equal(step(0), drawn(model, x))
    quiet.p = 0.5
    with pytest.warns(UserWarning, match="the model drew random numbers in step 1 for the first time"):
        step(1)
    assert torch.equal(step(2), drawn(model, x, step=2))
    assert torch.equal(step(3), drawn(model, x, step=3))


def test_a_repeated_forward_of_a_later_step_draws_the_same() -> None:
    model, x = Stack(Block(), Block()), numbers(4, 6).requires_grad_()
    expected: list[Tensor] = []
    found: list[Tensor] = []
    draws = RandomDraws(model, seed=0)
    for run, into in (
        (lambda block, x: block(x), expected),
        (lambda b, x: checkpoint(b, x, use_reentrant=False), found),
    ):
        model.run = run
        for number in range(3):
            draws.begin(number)
            with draws.running(SampleRows(0, 4)):
                loss = model(x).square().sum()
            with draws.running(SampleRows(0, 4), again=True):
                into.extend(torch.autograd.grad(loss, list(model.parameters())))
            draws.finish()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
