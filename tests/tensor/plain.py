"""Plain models, as users write them, whose parts are to be found."""

import re

from torch import Tensor, nn
from torch.nn import functional

from meshwise.reference import GPT, GPTConfig


def gpt(**changes: object) -> GPT:
    shape: dict[str, object] = {"width": 16, "heads": 4, "layers": 2, "vocabulary": 24, "context": 8, "bias": True}
    return GPT(GPTConfig(**{**shape, **changes}))  # type: ignore[arg-type]


class Attention(nn.Module):
    """As users write it: square matrices, in one module."""

    def __init__(self, width: int, heads: int, *, kv_heads: int) -> None:
        super().__init__()
        self.n_head, self.head_width = heads, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, kv_heads * self.head_width)
        self.v = nn.Linear(width, kv_heads * self.head_width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, attention: nn.Module, *, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


def stack(kv_heads: int = 4, hidden: int = 48) -> nn.Sequential:
    blocks = [Block(Attention(16, 4, kv_heads=kv_heads), width=16, hidden=hidden) for _ in range(2)]
    return nn.Sequential(nn.Embedding(24, 16), *blocks, nn.Linear(16, 24))


def shown(error: BaseException) -> dict[str, str]:
    """The rules that an error shows, as they stand there."""
    return dict(re.findall(r'"([^"]+)": "([^"]+)"', str(error).partition("as in ")[2]))
