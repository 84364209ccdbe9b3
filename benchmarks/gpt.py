"""The one model, data and optimizer on which every contestant of `peers.py` is measured.

It needs torch and nothing else, because it is also imported by interpreters that have a peer installed and not this
project. Every contestant starts from the same weights, sees the same tokens and calls the same AdamW kernel; what is
left to differ is how the work is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the global batch; the defaults make 33.7 million parameters."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    sequence: int = 256
    vocabulary: int = 8192
    batch: int = 16

    def __str__(self) -> str:
        return (
            f"GPT of {self.layers} layers, width {self.width}, {self.heads} heads, sequence {self.sequence}, "
            f"vocabulary {self.vocabulary}, global batch {self.batch}"
        )


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> [B, T, width]."""
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """A decoder with learned positions and an untied output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[B, T] -> logits[B, T, vocabulary]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def build(shape: Shape) -> GPT:
    """The same weights every time."""
    torch.manual_seed(1234)
    model = GPT(shape)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def global_batch(shape: Shape, *, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of one step, each [batch, sequence], the same for every contestant."""
    generator = torch.Generator().manual_seed(10_000 + step)
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rank_batch(shape: Shape, *, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of the global batch that belong to one rank."""
    tokens, targets = global_batch(shape, step=step)
    return tokens.tensor_split(size)[rank], targets.tensor_split(size)[rank]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
