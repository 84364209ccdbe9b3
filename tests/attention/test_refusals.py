"""What cannot work with split tokens is refused, with a change that works."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise import Plan, PlanError, World, parallelize
from meshwise.reference import GPT, GPTConfig
from meshwise.reference.gpt import next_token_loss
from meshwise.testing import run

CONFIG = GPTConfig(vocabulary=16, context=16, layers=1, heads=3, width=12)


@pytest.mark.parametrize(
    "plan, nearest",
    [
        ("context=ring", "dp=1"),
        ("cp=4 cp_heads=2", "cp=4"),
        ("cp=2 tp=4 tp_mode=2d", "tp=4 cp=2"),
    ],
)
def test_a_plan_that_contradicts_itself_names_the_nearest_one(plan: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"Nearest that works: '{nearest}'"):
        Plan.parse(plan)


def step(plan: str, *, model: Any = None, batch: Any = None) -> None:
    def main(world: World) -> None:
        trainer = parallelize(model or (lambda: GPT(CONFIG)), plan, loss=next_token_loss, world=world)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        trainer.step((tokens, tokens) if batch is None else batch)

    run(Plan.parse(plan).cp, main)


def test_cp_heads_divides_cp() -> None:
    with pytest.raises(PlanError, match="Nearest that works: 'cp_heads=2'"):
        step("cp=4 context=usp cp_heads=3")


def test_heads_divide_among_the_ranks_that_exchange_them() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide among the 2 ranks"):
        step("cp=2 context=ulysses")


def test_images_have_no_tokens() -> None:
    images = torch.zeros(2, 3, 8, 8)
    with pytest.raises(
        ValueError, match=r"cp splits tokens, and the first tensor of the batch, of shape \(2, 3, 8, 8\)"
    ):
        step("cp=2", batch=(images, images))


class OwnMask(nn.Module):
    """Makes a mask of its own tokens by comparing `what`, the tokens or their positions."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.what = what

    def forward(self, tokens: Tensor) -> Tensor:
        x, what = self.embedding(tokens)[:, None], self.what(tokens)
        return functional.scaled_dot_product_attention(x, x, x, what[..., :, None] >= what[..., None, :])[:, 0]


@pytest.mark.parametrize(
    "what, length, message",
    [
        (lambda tokens: tokens[:, None], 8, "Use is_causal=True, or a pattern"),
        (
            lambda tokens: torch.arange(tokens.size(1), device=tokens.device)[None],
            2,
            "one of 2 tokens: a row and a column",
        ),
    ],
)
def test_a_mask_of_own_tokens_in_both_dims_is_refused(what: Any, length: int, message: str) -> None:
    tokens = torch.zeros(2, length, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        step("cp=2 context=ring", model=lambda: OwnMask(what), batch=(tokens, tokens))


def test_prediction_and_evaluation_are_of_whole_sequences() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=16, context=16, layers=1, heads=2, width=12)).double()
    tokens = torch.randint(16, (2, 7))
    expected = model(tokens).detach()
    total, count = next_token_loss(expected, (tokens, tokens))

    def main(world: World) -> tuple[Tensor, float, int]:
        trainer = parallelize(copy.deepcopy(model), "cp=2", loss=next_token_loss, world=world)
        result = trainer.evaluate([(tokens, tokens)])
        return trainer.predict(tokens), result.loss, result.tokens

    for output, loss, tokens_counted in run(2, main):
        torch.testing.assert_close(output, expected)
        assert loss == pytest.approx(float(total) / int(count), rel=1e-12)
        assert tokens_counted == int(count)
