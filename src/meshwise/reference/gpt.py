"""A decoder-only transformer (GPT) and a multilayer perceptron (MLP) in plain torch, written for one device.

          tokens (B, T)
             │
    token embedding (+ learned positions)          x is (B, T, width) from here on
             │
      ┌─ norm ─ attention ─┐
      ├──────── + ─────────┘        × layers       pre-norm: the residual stream is never normalised itself
      ├─ norm ─ mlp ───────┐
      └──────── + ─────────┘
             │
        norm ─ head                                logits (B, T, vocabulary)

The initialization is GPT-2's (Radford et al., 2019): normal with a standard deviation of 0.02. The two projections that
write to the residual stream are scaled by 1/sqrt(2 · layers), so that the stream's variance does not grow with depth.
Rotary positions follow Su et al., 2021; grouped-query attention (fewer key-value heads) Ainslie et al., 2023."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Target that marks a token without loss, as in torch's cross-entropy."""


def next_token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats, summed over the targets, and the number of targets: two scalar tensors.

    `logits` is (..., vocabulary). `batch` is (inputs, targets) with integer targets (...). Targets of -100 are ignored.
    Logits narrower than fp32 are converted to fp32. Raises TypeError if the model returned no tensor, and ValueError if
    the shapes of targets and logits differ in other dims than the vocabulary."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned a {type(logits).__name__}, but this loss takes a tensor of logits; write "
            "your own loss(output, batch), and set loss = 'my_module:my_loss' in the job"
        )
    targets = batch[1]
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(targets.shape)}"
        )
    scores = logits.flatten(0, -2)
    if scores.element_size() < 4:
        scores = scores.float()
    total = functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


INIT_STD = 0.02
"""Standard deviation of the initial matrices."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a GPT."""

    vocabulary: int = 256
    """Number of different tokens; 256 is bytes."""
    context: int = 256
    """Maximum sequence length, in tokens."""
    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads of a block; must divide the width."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads/kv_heads query heads; None: as many as `heads`."""
    width: int = 128
    """Features of the residual stream."""
    mlp_ratio: float = 4.0
    """Hidden features of the MLP, as a multiple of the width."""
    positions: Literal["learned", "rotary"] = "learned"
    """Kind of position encoding: an embedding added to the input, or a rotation of queries and keys."""
    tied: bool = False
    """True if the output head and the token embedding are one matrix."""
    dropout: float = 0.0
    """Probability of dropping an element after the embedding, in attention and before each residual addition."""
    bias: bool = False
    """True if linear layers (the head aside) and norms have a bias."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.positions not in ("learned", "rotary"):
            raise ValueError(f"positions={self.positions!r} must be 'learned' or 'rotary'")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head width; width/heads is {self.head_width}")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Features of the MLP's hidden layer."""
        return int(self.width * self.mlp_ratio)


class Rotary(nn.Module):
    """Rotary position encoding: it rotates pairs of features by angles that grow with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, *, base: float = 10_000.0) -> None:
        super().__init__()
        half = config.head_width // 2
        frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, heads, T, head_width), rotated."""
        cos, sin = (table[: x.size(-2)].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        kv_heads = config.kv_heads or config.heads
        self.heads = (config.heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(config.width, sum(self.heads) * config.head_width, bias=config.bias)
        self.rotary = Rotary(config) if config.positions == "rotary" else nn.Identity()
        self.projection = nn.Linear(config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        mixed = functional.scaled_dot_product_attention(
            self.rotary(q),
            self.rotary(k),
            v,
            is_causal=True,
            dropout_p=self.config.dropout if self.training else 0.0,
            enable_gqa=self.heads[0] != self.heads[1],
        )
        output: Tensor = self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return output


class FeedForward(nn.Module):
    """MLP of a block: two linear layers with GELU between them, then dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.projection = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to (..., width)."""
        output: Tensor = self.dropout(self.projection(functional.gelu(self.expansion(x))))
        return output


class Block(nn.Module):
    """One pre-norm transformer block."""

    mlp_class: type[nn.Module] = FeedForward

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = self.mlp_class(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class GPT(nn.Module):
    """Decoder-only transformer, as in the picture of the module docstring."""

    block_class: type[Block] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block_class(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                writes_residual = name.endswith(("projection.weight", "experts.projection"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of integer tokens (B, T). Raises ValueError if T exceeds the context."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input (B, T, width) of the first block for tokens (B, T). Raises ValueError if T is too large."""
        length = tokens.size(1)
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit the context of {self.config.context}; set context={length}")
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        hidden: Tensor = self.dropout(x)
        return hidden


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP."""

    widths: tuple[int, ...] = (16, 64, 64, 4)
    """Features of the input, of every hidden layer and of the output: two or more."""
    bias: bool = True
    """Whether every layer adds a bias."""


class MLP(nn.Module):
    """Linear layers with GELU between them."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        pairs = zip(config.widths, config.widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(wide, narrow, bias=config.bias) for wide, narrow in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., widths[0]) to (..., widths[-1])."""
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        output: Tensor = self.layers[-1](x)
        return output
