"""A GPT with a mixture of experts in place of each MLP, in plain torch, written for one device.

    x (B, T, width) ── router ── index, weights (B·T, k) ──┐
     │                                                     │
     └───────────── tokens (B·T, width) ───────────── experts ── x (B, T, width)

The router scores every expert for every token, and chooses in one of four ways. Losses keep the load even and the
scores small. They have one value for each token, so that no plan changes their sum. docs/experts.md has the ways and
the losses with their papers ("Which models").

The index `experts` (one past the last expert) means no expert. With a capacity, a token that comes to an expert after
the expert is full gets this index. Only tokens of the same sequence count, so sequences do not affect each other."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.reference.gpt import GPT, IGNORED, Block, GPTConfig, next_token_loss


@dataclass(frozen=True)
class MixtureConfig(GPTConfig):
    """Sizes and options of a GPT with mixtures of experts."""

    experts: int = 8
    """Number of experts of each mixture."""
    choices: int = 2
    """Experts that each token is sent to; under expert-choice on average."""
    routing: Literal["top-k", "noisy", "expert-choice", "biased"] = "top-k"
    """How the router chooses experts."""
    capacity: float | None = None
    """Most tokens of a sequence that one expert takes, as a multiple of the even share; None: no limit."""
    balance: float = 0.0
    """Weight of the balance loss; with it or `z_loss` the model returns (logits, weighted losses of each token)."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Tokens over which the balance loss evens the load of the experts: of each sequence, or of the global batch."""
    z_loss: float = 0.0
    """Weight of the z-loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.choices <= self.experts:
            raise ValueError(f"choices={self.choices} must be 1 to experts={self.experts}")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(f"capacity={self.capacity} must be above 0, as 1.25; leave it out for no limit")
        if self.routing not in ("top-k", "noisy", "expert-choice", "biased"):
            raise ValueError(f"routing={self.routing!r} must be 'top-k', 'noisy', 'expert-choice' or 'biased'")
        if self.balance_over not in ("sequence", "batch"):
            raise ValueError(f"balance_over={self.balance_over!r} must be 'sequence' or 'batch'")

    def slots(self, tokens: int) -> int:
        """Return the most tokens of a sequence of `tokens` tokens that one expert takes."""
        share = tokens * self.choices / self.experts
        if self.routing == "expert-choice":
            return min(tokens, max(1, math.ceil(share * (self.capacity or 1.0))))
        return math.ceil(share * self.capacity) if self.capacity else tokens


class Router(nn.Module):
    """Router of a mixture: scores, and the chosen experts with their weights."""

    e_score_correction_bias: Tensor
    expert_shares: Tensor

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.scores = nn.Linear(config.width, config.experts, bias=False)
        self.noise = nn.Linear(config.width, config.experts, bias=False) if config.routing == "noisy" else None
        if config.routing == "biased":
            self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        if config.balance and config.balance_over == "batch":
            self.register_buffer("expert_shares", torch.full((config.experts,), 1 / config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, width) to indices and weights (B, T, k) and scores (B, T, experts). Expert-choice: k = experts."""
        scores = self.scores(x)
        if self.noise is not None and self.training:
            scores = scores + torch.randn_like(scores) * functional.softplus(self.noise(x))
        probabilities = scores.softmax(-1)
        config, tokens = self.config, x.size(1)
        if config.routing == "expert-choice":
            index = torch.arange(config.experts, device=x.device).expand_as(scores)
            taken = probabilities.transpose(1, 2).topk(config.slots(tokens), dim=-1).indices
            chosen = torch.zeros_like(scores).scatter(1, taken.transpose(1, 2), 1.0).bool()
            return index.masked_fill(~chosen, config.experts), probabilities, scores
        choice = probabilities + self.e_score_correction_bias if config.routing == "biased" else probabilities
        index = choice.topk(config.choices, dim=-1).indices
        weights = probabilities.gather(-1, index)
        if config.choices > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        if config.capacity:
            place = functional.one_hot(index, config.experts).flatten(1, 2).cumsum(1)
            place = place.unflatten(1, index.shape[1:]).gather(-1, index.unsqueeze(-1)).squeeze(-1)
            index = index.masked_fill(place > config.slots(tokens), config.experts)
        return index, weights, scores

    def losses(self, index: Tensor, *, scores: Tensor) -> Tensor:
        """Return the weighted losses of each token (B, T).

        The balance loss is experts · Σ share of choices · mean probability of an expert: 1 for an even load. With
        balance_over="batch", a token's loss has its own probability, so the mean of all losses is the balance loss."""
        config = self.config
        if not (config.z_loss or config.balance):
            return scores.new_zeros(scores.shape[:-1])
        losses = config.z_loss * scores.logsumexp(-1).square()
        if not config.balance:
            return losses
        probabilities = scores.softmax(-1)
        if config.balance_over == "batch":
            balance = (self.expert_shares * probabilities).sum(-1)
        else:
            share = functional.one_hot(index, config.experts + 1)[..., :-1].sum((1, 2)).to(scores.dtype)
            share = share / share.sum(-1, keepdim=True).clamp_min(1)
            balance = (share * probabilities.mean(1)).sum(-1, keepdim=True)
        return losses + config.balance * config.experts * balance


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


def balanced_loss(output: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy plus the router's losses of all tokens with a target, and the number of targets.

    Both are sums over samples, so micro-batches and ranks do not change the balance loss. `output`: (logits, losses
    (B, T)) of a model with `balance` or `z_loss` above 0. Raises ValueError if shapes of losses and targets differ."""
    if not isinstance(output, tuple):
        raise TypeError("the model returned no losses of routers; give it balance=0.01 or z_loss=0.001")
    logits, losses = output
    total, count = next_token_loss(logits, batch)
    if losses.shape != batch[1].shape:
        raise ValueError(
            f"the routers returned losses of {tuple(losses.shape)} for targets of {tuple(batch[1].shape)}: they got "
            "only some of the tokens. Use sequence_parallel=0"
        )
    return total + (losses * (batch[1] != IGNORED)).sum(), count


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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, T, width) to (B, T, width), and the losses of each token (B, T)."""
        index, weights, scores = self.router(x)
        mixed = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return self.dropout(mixed.view_as(x)), self.router.losses(index, scores=scores)


class MixtureBlock(Block):
    """One pre-norm transformer block with a mixture of experts."""

    mlp_class = ExpertsMLP

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map (B, T, width) to (B, T, width), and the losses of each token (B, T)."""
        x = x + self.attention(self.attention_norm(x))
        mixed, losses = self.mlp(self.mlp_norm(x))
        return x + mixed, losses


class MixtureGPT(GPT):
    """Decoder-only transformer with a mixture of experts in every block."""

    block_class = MixtureBlock

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.with_losses = bool(config.balance or config.z_loss)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the logits (B, T, vocabulary); if the config has losses, also their sum over the blocks (B, T)."""
        x, losses = self.embed(tokens), []
        for block in self.blocks:
            x, added = block(x)
            losses.append(added)
        logits: Tensor = self.head(self.norm(x))
        return (logits, torch.stack(losses).sum(0)) if self.with_losses else logits
