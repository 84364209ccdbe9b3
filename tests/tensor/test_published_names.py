"""Attentions that count their heads by the names of published sources are split without rules.

Each class has the names, and the order of reshapes, of one repository."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.verify import verify

WIDTH, HEADS, KEY_HEADS, WORDS = 32, 4, 2, 24


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


class LocalHeads(nn.Module):
    """The names of llama2.c, and of the LLaMA of Meta."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = HEADS, KEY_HEADS, WIDTH // HEADS
        self.n_rep = HEADS // KEY_HEADS
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(rows, tokens, self.n_local_heads, self.head_dim)
        k = k.view(rows, tokens, self.n_local_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        v = v.view(rows, tokens, self.n_local_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        output: Tensor = self.wo(attend(q, k, v).view(rows, tokens, -1))
        return output


class LocalKeyHeads(nn.Module):
    """The names of gpt-fast, whose `n_local_heads` are the KV heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim, self.dim = HEADS, KEY_HEADS, WIDTH // HEADS, WIDTH
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, size, size], dim=-1)
        q = q.view(rows, tokens, self.n_head, self.head_dim)
        k = k.view(rows, tokens, self.n_local_heads, self.head_dim)
        v = v.view(rows, tokens, self.n_local_heads, self.head_dim)
        output: Tensor = self.wo(attend(q, k, v).view(rows, tokens, self.dim))
        return output


@dataclass
class Config:
    n_head: int = HEADS
    n_query_groups: int = KEY_HEADS
    head_size: int = WIDTH // HEADS


class QueryGroups(nn.Module):
    """The names of LitGPT."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        heads = self.config.n_head + 2 * self.config.n_query_groups
        self.qkv = nn.Linear(WIDTH, heads * self.config.head_size)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, groups, width = self.config.n_head, self.config.n_query_groups, self.config.head_size
        rows, tokens, _ = x.size()
        q, k, v = self.qkv(x).split((heads * width, groups * width, groups * width), dim=-1)
        q = q.view(rows, tokens, heads, width)
        k, v = (y.view(rows, tokens, groups, width) for y in (k, v))
        output: Tensor = self.proj(attend(q, k, v).reshape(rows, tokens, heads * width))
        return output


def groups_of_one() -> nn.Module:
    return QueryGroups(Config(n_query_groups=HEADS))


class OutWidth(nn.Module):
    """The names of LLMs-from-scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = WIDTH, HEADS, WIDTH // HEADS
        self.W_query, self.W_key, self.W_value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        k, q, v = self.W_key(x), self.W_query(x), self.W_value(x)
        k, v, q = (y.view(rows, tokens, self.num_heads, self.head_dim) for y in (k, v, q))
        output: Tensor = self.out_proj(attend(q, k, v).view(rows, tokens, self.d_out))
        return output


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(self.norm(x))
        return output


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1"])
@pytest.mark.parametrize("attention", [LocalHeads, LocalKeyHeads, QueryGroups, groups_of_one, OutWidth])
def test_heads_are_split_by_the_names_of_a_published_source(attention: Callable[[], nn.Module], plan: str) -> None:
    def build() -> nn.Module:
        blocks = nn.Sequential(Block(attention()), Block(attention()))
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), blocks, nn.Linear(WIDTH, WORDS))

    roles = assign_roles(build(), plan=Plan.parse(plan))
    assert roles["1.0.attention"].role == "attention"
    drawn = torch.randint(WORDS, (2, 3, 6), generator=torch.Generator().manual_seed(3))
    assert verify(build, next_token_loss, [(drawn[0], drawn[1])], plan, lr=1e-2).ok
