"""Arguments of an attention besides hidden states, as masks and tables, have the rows and gradients of one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from tensor.splitting import split_agrees

WORDS, WIDTH, HEADS, TOKENS = 13, 12, 4, 5
PLANS = ("tp=2", "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d")


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.inwards, self.outwards = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, valid: Tensor, distance: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        """x (B, T, D), valid (B, T), distance (T, T), bias (1, heads, T, T), gain (B, T)."""
        q, k, v = self.inwards(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-1, -2) + distance + bias).masked_fill(~valid[:, None, None], -1e9)
        mixed = scores.softmax(-1) @ v * gain[:, None, :, None]
        output: Tensor = self.outwards(mixed.transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor, *arguments: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x), *arguments)
        output: Tensor = x + self.down(functional.gelu(self.up(x)))
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.far = nn.Embedding(TOKENS, 1)
        self.by_head = nn.Embedding(TOKENS, HEADS)
        self.gains = nn.Embedding(WORDS, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.words(tokens), torch.arange(TOKENS, device=tokens.device)
        apart = (places[:, None] - places).abs()
        bias = self.by_head(apart).permute(2, 0, 1)[None]
        distance, gain = self.far(apart).squeeze(-1), self.gains(tokens).squeeze(-1)
        for layer in self.layers:
            x = layer(x, tokens != 0, distance, bias, gain)
        logits: Tensor = self.head(x)
        return logits


def _loss(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    tokens, targets = inputs
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("plan", PLANS)
def test_arguments_have_the_rows_of_the_attention_and_the_gradient_of_all_heads(plan: str) -> None:
    torch.manual_seed(1)
    model = Model().double()
    tokens, targets = torch.randint(1, WORDS, (2, 8, TOKENS)).unbind()
    for row, length in enumerate((5, 2, 3, 4, 1, 5, 2, 4)):
        tokens[row, length:] = 0
    order = {"layers.*.mixer.inwards": "colwise sections=3"}  # no trial guesses these arguments
    parts = assign_roles(model, plan=Plan.parse(plan), rules=order)
    split_agrees(model, plan=plan, parts=parts, batch=((tokens, targets), _loss))
