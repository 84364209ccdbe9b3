"""Models that call torch's FlexAttention train under cp, and on a CPU, as with a dense mask on one process."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from grid import Grid
from last_outcome import alone, outcome
from meshwise import World, parallelize
from meshwise.attention.context_parallel import _flex_attention
from meshwise.reference.gpt import next_token_loss
from meshwise.testing import agree, run

TOKENS, WORDS, HEADS, KV_HEADS, FEATURES = 13, 29, 4, 2, 4
WIDTH = HEADS * FEATURES
compiled = torch.compile(flex_attention, backend="eager")


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (2, 4, TOKENS + 1), generator=draw)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


class Flexible(nn.Module):
    """One layer of attention to earlier tokens of the same kind; head 0 sees only the last 5.

    ALiBi's slopes and a soft cap change the scores, and the log-sum-exp of the scores scales the output."""

    def __init__(self, *, way: str = "plain") -> None:
        super().__init__()
        self.way, self.heads, self.kv_heads = way, HEADS, KV_HEADS
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, KV_HEADS * FEATURES)
        self.value = nn.Linear(WIDTH, KV_HEADS * FEATURES)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.slopes: Tensor
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        projections = self.query, self.key, self.value
        q, k, v = (one(x).unflatten(2, (-1, FEATURES)).transpose(1, 2) for one in projections)
        out, lse = self.attention(tokens, q, k, v)
        x = x + self.output((out * lse.sigmoid().unsqueeze(-1)).transpose(1, 2).flatten(2))
        output: Tensor = self.head(x)
        return output

    def attention(self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ids, slopes = before(tokens), self.slopes

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (ids[b, q] == ids[b, k]) & (q >= k) & ((h > 0) | (q - k < 5))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return 2 * torch.tanh(score / 2) - slopes[h] * (q - k)

        length = tokens.size(1)
        block = create_block_mask(mask_mod, tokens.size(0), HEADS, length, length, device=tokens.device)
        call = compiled if self.way == "compiled" else flex_attention
        out, aux = call(q, k, v, score_mod, block, enable_gqa=True, return_aux=AuxRequest(lse=True))  # type: ignore[arg-type]
        return out, aux.lse


def before(tokens: Tensor) -> Tensor:
    """Return the kind of each token, which a token knows without the others."""
    return tokens % 3


class Dense(Flexible):
    """The formula."""

    def attention(self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ids = before(tokens)[:, None]
        places, heads = (torch.arange(size, device=tokens.device) for size in (TOKENS, HEADS))
        heads = heads[:, None, None]
        distance = places[:, None] - places
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT / FEATURES**0.5
        scores = 2 * torch.tanh(scores / 2) - self.slopes[:, None, None] * distance
        allowed = (ids[..., :, None] == ids[..., None, :]) & (distance >= 0) & ((heads > 0) | (distance < 5))
        scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, 1), scores.logsumexp(-1)


def compare(plan: str, *, ranks: int, **model: Any) -> None:
    def main(world: World) -> Any:
        made = lambda: Flexible(**model).double()  # noqa: E731
        return outcome(parallelize(made, plan, loss=next_token_loss, world=world, lr=1e-2), batches=batches())

    single = alone(lambda: Dense().double(), loss=next_token_loss, batches=batches(), lr=1e-2)
    agree(run(ranks, main)[0], single, bound=1e-9)


@pytest.mark.grid(
    Grid(
        {
            "context": ("gather", "ring", "zigzag", "striped", "ulysses", "usp cp_heads=2", "window", "auto"),
            "cp": (2, 4),
            "way": ("plain", "compiled"),
            "zero": (0, 3),
        },
        cost=lambda cell: cell["cp"],
        strength=1,
    )
)
def test_flex_attention_under_cp_equals_dense_attention(context: str, cp: int, way: str, zero: int) -> None:
    compare(f"cp={cp} context={context} zero={zero}", ranks=cp, way=way)


@pytest.mark.grid(
    Grid({"plan": ("dp=1", "dp=2 microbatches=2", "tp=2", "tp=2 cp=2")}, heavy=lambda cell: cell["plan"] == "tp=2 cp=2")
)
def test_flex_attention_has_a_backward_on_a_cpu(plan: str) -> None:
    compare(plan, ranks=4 if "cp" in plan else int(plan[3]))


def test_a_block_mask_of_torch_and_log_sum_exp_as_torch_returns_them() -> None:
    block = torchs.create_block_mask(lambda b, _h, q, k: q - k < 3 + b, 2, None, TOKENS, TOKENS, device="cpu")
    q, k, v = torch.randn(3, 2, HEADS, TOKENS, FEATURES).unbind()
    with warnings.catch_warnings(action="ignore"):
        expected = torchs.flex_attention(q, k, v, block_mask=block, scale=0.3, return_lse=True)
    torch.testing.assert_close(_flex_attention(q, k, v, None, block, 0.3, return_lse=True), expected)


class LearnedBias(Flexible):
    def attention(self, _: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.query.bias
        out = flex_attention(q, k, v, score_mod=lambda score, _b, h, _q, _k: score + bias[h], enable_gqa=True)
        return out, torch.zeros(())


class Elsewhere(Flexible):
    def attention(self, _: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torchs.flex_attention(q.detach(), k.detach(), v.detach(), enable_gqa=True), torch.zeros(())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "kind, text",
    [
        (LearnedBias, "the score_mod of flex_attention reads a tensor that needs a gradient"),
        (Elsewhere, "in a file that has no class of the model"),
    ],
)
def test_refusals(kind: type[Flexible], text: str) -> None:
    def main(world: World) -> None:
        parallelize(lambda: kind().double(), "cp=2", loss=next_token_loss, world=world).step(batches()[0])

    with pytest.raises((ValueError, RuntimeError), match=text):  # torch compiles its own function, and wraps errors
        run(2, main)
