"""A GPT with a mixture of experts in place of each MLP, in plain torch, written for one device.

    x (B, T, width) ── router ── index, weights (B·T, k) ──┐
     │                                                     │
     └───────────── tokens (B·T, width) ───────────── experts ── x (B, T, width)

The router scores every expert for every token, and chooses in one of four ways. docs/experts.md has them with their
papers ("Which models").

The index `experts` (one past the last expert) means no expert. With a capacity, a token that comes to an expert after
the expert is full gets this index. Only tokens of the same sequence count, so sequences do not affect each other."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.reference.gpt import GPT, Block, GPTConfig


@dataclass(frozen=True)
class MixtureConfig(GPTConfig):
    """Sizes and options of a GPT with mixtures of experts."""

    experts: int = 8
    """Number of experts of each mixture."""
    choices: int = 2
    """Number of experts that each token is sent to; under expert-choice, on average over the tokens."""
    routing: Literal["top-k", "noisy", "expert-choice", "biased"] = "top-k"
    """How the router chooses experts."""
    capacity: float | None = None
    """Limit of the tokens of a sequence that one expert takes, as a multiple of the even share; None: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.choices <= self.experts:
            raise ValueError(f"choices={self.choices} must be 1 to experts={self.experts}")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(f"capacity={self.capacity} must be above 0, as 1.25; leave it out for no limit")
        if self.routing not in ("top-k", "noisy", "expert-choice", "biased"):
            raise ValueError(f"routing={self.routing!r} must be 'top-k', 'noisy', 'expert-choice' or 'biased'")

    def slots(self, tokens: int) -> int:
        """Return how many tokens of a sequence of `tokens` tokens one expert takes at most."""
        share = tokens * self.choices / self.experts
        if self.routing == "expert-choice":
            return min(tokens, max(1, math.ceil(share * (self.capacity or 1.0))))
        return math.ceil(share * self.capacity) if self.capacity else tokens


class Router(nn.Module):
    """Router of a mixture: scores, and the chosen experts with their weights."""

    e_score_correction_bias: Tensor

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.scores = nn.Linear(config.width, config.experts, bias=False)
        self.noise = nn.Linear(config.width, config.experts, bias=False) if config.routing == "noisy" else None
        if config.routing == "biased":
            self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, T, width) to indices and weights of the chosen experts (B, T, k). Expert-choice: k = experts."""
        scores = self.scores(x)
        if self.noise is not None and self.training:
            scores = scores + torch.randn_like(scores) * functional.softplus(self.noise(x))
        probabilities = scores.softmax(-1)
        config, tokens = self.config, x.size(1)
        if config.routing == "expert-choice":
            index = torch.arange(config.experts, device=x.device).expand_as(scores)
            taken = probabilities.transpose(1, 2).topk(config.slots(tokens), dim=-1).indices
            chosen = torch.zeros_like(scores).scatter(1, taken.transpose(1, 2), 1.0).bool()
            return index.masked_fill(~chosen, config.experts), probabilities
        choice = probabilities + self.e_score_correction_bias if config.routing == "biased" else probabilities
        index = choice.topk(config.choices, dim=-1).indices
        weights = probabilities.gather(-1, index)
        if config.choices > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        if config.capacity:
            place = functional.one_hot(index, config.experts).flatten(1, 2).cumsum(1)
            place = place.unflatten(1, index.shape[1:]).gather(-1, index.unsqueeze(-1)).squeeze(-1)
            index = index.masked_fill(place > config.slots(tokens), config.experts)
        return index, weights


class Experts(nn.Module):
    """MLPs of all experts: two matrices each, with GELU between them, as one tensor per layer."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.is_transposed = True  # transformers' name for matrices stored as (experts, inputs, outputs)
        self.expansion = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.projection = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Map tokens (n, width) to (n, width), with the experts `index` (n, k) of each token and `weights` (n, k)."""
        chosen, choices = index.flatten(), index.size(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        counts = counts.index_add(0, chosen, torch.ones_like(chosen))[: self.num_experts]
        rows = _products(tokens[order // choices], self.expansion, counts)
        rows = _products(functional.gelu(rows), self.projection, counts)
        order = order[: len(rows)]
        weighted = rows * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // choices, weighted)


def _products(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply the first counts[0] rows by the first matrix, the next counts[1] by the second, and drop the rest."""
    if rows.is_meta:
        return functional.grouped_mm(rows, matrices, offs=counts.cumsum(0).int())
    sizes = counts.tolist()
    parts = zip(rows[: sum(sizes)].split(sizes), matrices, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


class ExpertsMLP(nn.Module):
    """Mixture of experts of a block, in place of its MLP."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        index, weights = self.router(x)
        mixed: Tensor = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        dropped: Tensor = self.dropout(mixed.view_as(x))
        return dropped


class MixtureBlock(Block):
    """One pre-norm transformer block with a mixture of experts."""

    mlp_class = ExpertsMLP


class MixtureGPT(GPT):
    """Decoder-only transformer with a mixture of experts in every block."""

    block_class = MixtureBlock
