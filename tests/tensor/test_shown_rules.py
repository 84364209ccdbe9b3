"""Rules that an error shows work as they are shown."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import Rules, assign_roles
from tensor.plain import shown
from tensor.splitting import split_agrees


def with_blocks(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict(
        {"embedding": nn.Embedding(24, 16), "blocks": nn.ModuleList(blocks), "head": nn.Linear(16, 24)}
    )


class Parts(nn.Module):
    """Matrices under any names and in any order, of which the last of `names` closes what the others open."""

    def __init__(self, names: str, *, hidden: int, order: str = "") -> None:
        super().__init__()
        self.names = names
        for name in order or names:
            self.add_module(name, nn.Linear(hidden, 16) if name == names[-1] else nn.Linear(16, hidden))

    def forward(self, x: Tensor) -> Tensor:
        *opened, closes = (self.get_submodule(name) for name in self.names)
        output: Tensor = x + closes(self.between(*(opens(x) for opens in opened)))
        return output

    def between(self, gate: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        return functional.silu(gate) * sum(more, up)


class Heads(Parts):
    """Attention whose number of heads only the forward knows: they are 4 wide."""

    def between(self, *opened: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in opened)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Chained(Parts):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + functools.reduce(lambda y, name: self.get_submodule(name)(y).relu(), self.names, x)
        return output


@pytest.mark.parametrize(
    "block, rules",
    [
        (Chained("abc", hidden=16), {}),
        (Parts("gud", hidden=48), {"blocks.*.d": "whole"}),
        (Parts("gud", hidden=48), {"blocks.*.d": "colwise"}),
        (Parts("gud", hidden=16), {"blocks.*.g": "rowwise", "blocks.*.d": "colwise"}),
        (Heads("abcd", hidden=16), {"blocks.*.a": "rowwise"}),
    ],
)
@pytest.mark.parametrize("plan", ["tp=2", "tp=4 tp_mode=2d"])
def test_rules_that_are_shown_work_as_they_stand(block: nn.Module, rules: Rules, plan: str) -> None:
    model = with_blocks(block, copy.deepcopy(block))
    with pytest.raises(ValueError, match="found no role") as caught:
        assign_roles(model, plan=Plan.parse(plan), rules=rules)
    if "and take tp_mode=1d" in str(caught.value):
        plan = "tp=2"
    assert assign_roles(model, plan=Plan.parse(plan), rules={**rules, **shown(caught.value)})


def test_rules_for_matrices_that_a_block_holds_itself_come_with_all_tokens() -> None:
    """The blocks of OLMo hold the matrices of their attention: they would attend to a part of the tokens alone."""
    with pytest.raises(ValueError, match="found no role") as caught:
        assign_roles(
            with_blocks(*(Chained("abc", hidden=16) for _ in range(2))), plan=Plan.parse("tp=2 sequence_parallel=1")
        )
    assert shown(caught.value)
    assert "and take tp_mode=1d sequence_parallel=0" in str(caught.value)


class Pooled(nn.Module):
    """An attention outside of the blocks makes one token of all, with a table of as many rows as there are features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Parts("gud", hidden=48) for _ in range(2))
        self.attention, self.far = nn.MultiheadAttention(16, 4, batch_first=True), nn.Embedding(16, 1)
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = functools.reduce(lambda x, block: block(x), self.blocks, self.embedding(tokens))
        near: Tensor = self.far(torch.arange(x.size(1), device=x.device)).mT
        logits: Tensor = self.head(self.attention(x.mean(1, keepdim=True), x, x, attn_mask=near)[0][:, 0])
        return logits


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1"])
def test_the_rule_shown_for_an_attention_outside_of_the_blocks_keeps_all_of_it_whole(plan: str) -> None:
    torch.manual_seed(1)
    model, tokens = Pooled().double(), torch.randint(0, 24, (4, 6))
    with pytest.raises(ValueError, match="found no role") as caught:
        assign_roles(model, plan=Plan.parse(plan))
    rules = shown(caught.value)
    assert rules == {"attention": "whole"}
    parts = assign_roles(model, plan=Plan.parse(plan), rules=rules)
    split_agrees(model, plan=plan, parts=parts, batch=((tokens,), lambda model, batch: model(batch[0]).exp().sum()))


def test_a_table_with_as_many_rows_as_features_is_not_a_reader_of_hidden_states() -> None:
    model = with_blocks(*(Parts("gud", hidden=48) for _ in range(2)))
    model.add_module("far", nn.Embedding(16, 4))
    assert assign_roles(model, plan=Plan(tp=4, tp_mode="2d"))["far"].role == "whole"
    model.add_module("far", nn.Embedding(5, 16))
    with pytest.raises(ValueError, match="far: Embedding is kept whole, and it makes hidden states"):
        assign_roles(model, plan=Plan(tp=4, tp_mode="2d"), rules={"far": "whole"})
