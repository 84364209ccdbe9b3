"""Models that draw, for the tests of draws."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.model.random_draws import RandomDraws, SampleRows


def attention(q: Tensor, *, dropout_p: float = 0.4, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p, **options)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, train=True),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.4, inplace=True),
    "dropout1d": lambda x: functional.dropout1d(x[:, :, None], 0.4),
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None], 0.4),
    "dropout3d": lambda x: functional.dropout3d(x[:, :, None, None, None], 0.4),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x[:, :, None], 0.4, training=True),
    "attention": lambda x: attention(x.view(-1, 2, 4, 2)),
    "bernoulli of a tensor": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x, 0.4),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "stochastic depth": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.6),
    "rand": lambda x: torch.rand(len(x), 3, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "randn": lambda x: torch.randn(len(x), 3, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "gumbel_softmax": functional.gumbel_softmax,
}


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Block(nn.Module):
    """A residual block that draws three times, twice with the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.dropout(self.layer(self.dropout(x))), 0.4, self.training)


class Stack(nn.Module):
    """Blocks, each run by `run(block, x)`."""

    def __init__(
        self, *blocks: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def drawn(model: nn.Module, x: Any, *, rows: SampleRows | None = None, step: int = 0, seed: int = 0) -> Any:
    """What a model makes of x, with draws of its own."""
    draws = RandomDraws(model, seed=seed)
    draws.begin(step)
    with draws.running(rows or SampleRows(0, len(x))):
        result = model(x)
    draws.close()
    return result
