"""What only a forward shows, its first: weights that are read where no module is called, and blocks out of order."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.testing import run
from tensor.plain import gpt


class Mlp(nn.Module):
    """Multiplies by hand."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, 16) / 4)
        self.down = nn.Parameter(torch.randn(16, hidden) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.gelu(functional.linear(x, self.up)), self.down)


class Model(nn.Module):
    """Blocks of the reference GPT, called as a test wants it."""

    def __init__(
        self, *, tied: bool = False, halves: bool = False, backwards: bool = False, between: bool = False
    ) -> None:
        super().__init__()
        self.body = gpt()
        self.body.norm = nn.LayerNorm(16)
        self.between = nn.Linear(16, 16) if between else None
        self.tied, self.halves, self.backwards = tied, halves, backwards

    def forward(self, tokens: Tensor) -> Tensor:
        body = self.body
        x: Tensor = body.embedding(tokens)
        for block in reversed(body.blocks) if self.backwards else body.blocks:
            x = block(x)
            if self.between is not None and block is body.blocks[0]:
                x = self.between(x)
        x = body.norm(x)
        if self.halves:
            return torch.cat([functional.linear(x, half) for half in body.embedding.weight.chunk(2)], dim=-1)
        logits: Tensor = functional.linear(x, 2 * body.embedding.weight) if self.tied else body.head(x)
        return logits


def step(model: nn.Module, plan: str, rules: dict[str, str] | None = None) -> None:
    tokens = torch.randint(0, 24, (4, 7), generator=torch.Generator().manual_seed(1))

    def main(world: World) -> Any:
        settings: dict[str, Any] = {"loss": next_token_loss, "lr": 1e-2, "options": Options(tensor_rules=rules)}
        trainer = parallelize(copy.deepcopy(model), plan, world=world, **settings)
        trainer.step((tokens[:, :-1], tokens[:, 1:]))

    run(Plan.parse(plan).mesh().size, main)


@pytest.mark.parametrize("how", ["tied", "halves"])
def test_what_is_computed_of_a_split_weight_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight is split over the ranks of tp, and the forward computes"):
        step(Model(**{how: True}), "tp=2")


def test_parameters_that_rules_make_matrices_are_multiplied_by_nobody() -> None:
    model = Model()
    model.body.blocks[1].mlp = Mlp()
    rules = {"body.blocks.1.mlp.up": "first", "body.blocks.1.mlp.down": "second"}
    with pytest.raises(ValueError, match=r'mlp\.down is split.*a rule such as "body\.blocks\.1\.mlp": "whole"'):
        step(model, "tp=2", rules)
    step(model, "tp=2", {"body.blocks.1.mlp": "whole"})


class ByHand(nn.Module):
    """Runs the forward of its module, and does not call it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner.forward(x)
        return output


def test_what_is_run_by_its_forward_is_to_be_called() -> None:
    model = Model()
    model.body.blocks[0].attention_norm = ByHand(model.get_submodule("body.blocks.0.attention_norm"))
    step(model, "tp=2 sequence_parallel=1")
    with pytest.raises(
        ValueError, match=r"runs the forward of a LayerNorm without calling it.*module\(x\) in place of"
    ):
        step(model, "tp=4 tp_mode=2d")


def test_blocks_that_are_run_by_their_forward_are_to_be_called() -> None:
    class Running(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.body.embedding(tokens)
            for block in self.body.blocks:
                x = block.forward(x)
            logits: Tensor = self.body.head(self.body.norm(x))
            return logits

    step(Running(), "tp=2")
    with pytest.raises(
        ValueError, match=r"body\.blocks\.0 and the blocks behind it run without being called.*as block"
    ):
        step(Running(), "tp=2 sequence_parallel=1")


@pytest.mark.parametrize("changes", [{"backwards": True}, {"between": True}])
def test_blocks_between_which_the_tokens_are_split_come_in_order(changes: dict[str, bool]) -> None:
    step(Model(**changes), "tp=2")
    with pytest.raises(ValueError, match=r"cut where body\.blocks\.0 begins and put together where body\.blocks\.1"):
        step(Model(**changes), "tp=2 sequence_parallel=1")
