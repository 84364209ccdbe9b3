"""Test what forwards of hand-written modules show: who reads the input, what children read, the order in a matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.detect.assign_tp_roles import planned_roles
from meshwise.tensor.detect.layer_formulas import as_norm

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Attention with norms over all heads, which a helper calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.skip = HEADS, False
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
        self.norm = nn.LayerNorm(WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return split.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q: Tensor = self.q(x)
        k, v = self.k_norm(self.k(x)), self.v(x)
        found = functional.scaled_dot_product_attention(self.heads(self.q_norm(q)), self.heads(k), self.heads(v))
        y = self.out(found.transpose(1, 2).flatten(2))
        if self.skip:
            y = y + x
        normed: Tensor = self.norm(y)
        return normed


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, scale: float = 2.0, *, exact: bool = False) -> Tensor:
        hidden = functional.gelu(self.up(x)) if exact else functional.silu(self.up(x))
        y: Tensor = self.down(hidden * scale)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y: Tensor = x + self.mlp(self.second(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def roles() -> Mapping[str, Part]:
    return planned_roles(Model(), plan=Plan(tp=2), rules=None)


def test_norms_before_the_output_are_split_and_norms_after_it_are_not() -> None:
    found = roles()
    assert all(found[f"blocks.0.attention.{which}_norm"].inner for which in "qk")
    assert found["blocks.0.attention.norm"].role == "norm"
    assert not found["blocks.0.attention.norm"].inner


def test_numbers_and_flags_of_a_forward_keep_an_mlp_split() -> None:
    found = roles()
    assert (found["blocks.0.mlp.up"].role, found["blocks.0.mlp.down"].role) == ("colwise", "rowwise")


def test_a_group_norm_of_one_group_is_no_layer_norm() -> None:
    """On (rows, features) it is one; on (rows, features, tokens) it normalises over the tokens too."""
    assert as_norm(nn.GroupNorm(1, WIDTH)) is None
    found = as_norm(nn.LayerNorm(WIDTH, dtype=torch.float64))
    assert found is not None
    assert found[0] == WIDTH
