"""A GPT as Megatron-LM had it in the runs that `published.py` predicts: fp16, attention as products and a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.precision.dtype_policy import Precision

PRECISION = Precision(
    parameters=torch.float16,
    compute=torch.float16,
    reduction=torch.float16,
    accumulation=torch.float16,
    master=torch.float32,
)
"""Megatron-LM's fp16: gradients stay in it until the update."""

DROPOUT = 0.1
"""Megatron-LM's default."""


class Attention(nn.Module):
    """Causal attention as two products and a softmax, as it was computed before it was fused."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.heads = (heads, heads, heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2).split(self.heads, dim=1)
        scores = (q * (1 / math.sqrt(self.head_width))) @ k.transpose(-1, -2)
        mixed = self.dropout(functional.softmax(scores, dim=-1)) @ v
        output: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        x = x + self.dropout(self.attention(self.first_norm(x)))
        output: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.second_norm(x)))))
        return output


class Megatron(nn.Module):
    """A GPT as the published runs had it."""

    def __init__(self, *, layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to logits."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The sum over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()
