"""Attention over ranks that split the tokens equals torch's attention over all tokens: output and every gradient."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grid import Grid
from meshwise import Mesh
from meshwise.attention.kv_exchange import DirectExchange, GatherExchange, KeyExchange, RingExchange
from meshwise.attention.mask_pattern import (
    Pattern,
    TilePair,
    blocks,
    causal,
    dilated,
    documents,
    fixed,
    full,
    global_tokens,
    padding,
    prefix,
    random_blocks,
    window,
)
from meshwise.attention.split_attention import attend, split_attention
from meshwise.attention.tiled_attention import ScoreRules, TiledAttention
from meshwise.comm.api.world import World
from meshwise.layout.layout import TokenRanges, token_order
from meshwise.testing import run

SAMPLES, HEADS, FEATURES, LENGTH = 2, 4, 8, 23
IDS = torch.tensor([[0] * 5 + [1] * 11 + [2] * 7, [0] * 14 + [1] * 9])
PATTERNS: dict[str, Pattern] = {
    "full": full(),
    "causal": causal(),
    "window": causal() & window(6),
    "wide": window(5),
    "prefix": causal() | prefix(4),
    "dilated": dilated(9, step=3),
    "longformer": window(3) | global_tokens(2),
    "blocks": (blocks(4) | random_blocks(4, every=3, seed=5)) & causal(),
    "fixed": fixed(5, summary=2) & causal(),
    "packed": causal() & documents(IDS),
    "padded": padding(torch.arange(LENGTH) < torch.tensor([[19], [23]])),
}


def tensors(kv_heads: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(SAMPLES, heads, LENGTH, FEATURES) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def dense_mask(pattern: Pattern) -> Tensor:
    [tile] = TokenRanges.whole(LENGTH).tiles(LENGTH)
    return pattern.mask(TilePair(tile, tile), device=torch.device("cpu"))


def expected(pattern: Pattern, kv_heads: int) -> list[Tensor]:
    q, k, v, do = tensors(kv_heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(pattern), enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, do)]


def ring(world: World) -> World:
    """Return a world with all ranks in `ring`, where each rank may send to each other rank at once."""
    world = world.over(Mesh((("ring", world.size),)))
    world.prepare(lines=itertools.permutations(range(world.size), 2))
    return world


def exchange_of(kind: str, world: World, order: Any, pattern: Pattern) -> KeyExchange:
    if kind == "direct":
        return DirectExchange(world, "ring", order, pattern)
    return (GatherExchange if kind == "gather" else RingExchange)(world, "ring", order)


@pytest.mark.grid(
    Grid(
        {
            "exchange": ("gather", "rotate", "direct"),
            "cp": (2, 3, 4),
            "order": ("contiguous", "zigzag", "striped"),
            "pattern": tuple(PATTERNS),
            "kv_heads": (1, 2, 4),
        }
    )
)
def test_every_exchange_gives_the_output_and_gradients_of_torch(
    exchange: str, cp: int, order: str, pattern: str, kv_heads: int
) -> None:
    shares = token_order(order, length=LENGTH, parts=cp)

    def main(world: World) -> list[Tensor]:
        world = ring(world)
        mine = shares[world.rank]
        q, k, v, do = (mine.take(x, dim=2).to(world.device, copy=True) for x in tensors(kv_heads))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        rules = ScoreRules(PATTERNS[pattern], 1 / math.sqrt(FEATURES))
        tiles, keys = TiledAttention(rules, queries=mine), exchange_of(exchange, world, shares, rules.pattern)
        out, _ = split_attention((inputs[0], inputs[1], inputs[2]), tiles=tiles, exchange=keys)
        return [out.detach(), *torch.autograd.grad(out, inputs, do)]

    of_ranks = run(cp, main)
    for number, whole in enumerate(expected(PATTERNS[pattern], kv_heads)):
        for rank, share in enumerate(shares):
            torch.testing.assert_close(of_ranks[rank][number], share.take(whole, dim=2), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attend_on_one_process_gives_the_output_and_gradients_of_torch(pattern: str) -> None:
    q, k, v, do = tensors(2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, pattern=PATTERNS[pattern])
    for ours, theirs in zip([out, *torch.autograd.grad(out, inputs, do)], expected(PATTERNS[pattern], 2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_soft_cap_sinks_and_a_bias_have_the_gradients_of_the_formula() -> None:
    q, k, v, do = tensors(2)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    sinks = torch.randn(HEADS, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, bias, sinks)]

    def formula() -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(FEATURES)
        scores = 3.0 * torch.tanh(scores / 3.0) + bias
        scores = scores.masked_fill(~dense_mask(causal()), -math.inf)
        sink = sinks.view(1, -1, 1, 1).expand(SAMPLES, -1, LENGTH, 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)

    ours = attend(q, k, v, pattern=causal(), mask=bias, softcap=3.0, sinks=sinks)
    theirs = formula()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    for one, other in zip(torch.autograd.grad(ours, inputs, do), torch.autograd.grad(theirs, inputs, do), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_half_precision_is_merged_in_fp32() -> None:
    inputs = tensors(4, dtype=torch.bfloat16)[:3]
    q, k, v = (x.double() for x in inputs)
    exact = functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def main(world: World) -> Tensor:
        world = ring(world)
        shares = token_order("zigzag", length=LENGTH, parts=4)
        mine = shares[world.rank]
        rules = ScoreRules(causal(), 1 / math.sqrt(FEATURES))
        q, k, v = (mine.take(x, dim=2).to(world.device) for x in inputs)
        tiles = TiledAttention(rules, queries=mine)
        return split_attention((q, k, v), tiles=tiles, exchange=RingExchange(world, "ring", shares))[0]

    for share, out in zip(token_order("zigzag", length=LENGTH, parts=4), run(4, main), strict=True):
        assert out.dtype == torch.bfloat16
        rounded = share.take(exact, dim=2).to(torch.bfloat16).double()  # one rounding, at the end
        assert float((out.double() - rounded).abs().max()) <= 2**-8


def test_a_ring_passes_on_n_minus_1_blocks_forward_and_2n_minus_1_backward() -> None:
    ranks, length = 4, 32

    def main(world: World) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        world = ring(world)
        shares = token_order("zigzag", length=length, parts=ranks)
        shape = 1, 2, length // ranks, 4
        q, k, v = (torch.randn(shape, device=world.device, requires_grad=True) for _ in range(3))
        tiles = TiledAttention(ScoreRules(causal(), 0.5), queries=shares[world.rank])
        with world.record() as forward:
            out, _ = split_attention((q, k, v), tiles=tiles, exchange=RingExchange(world, "ring", shares))
        with world.record() as backward:
            out.sum().backward()
        return ([(r.kind, r.bytes) for r in forward], [(r.kind, r.bytes) for r in backward])

    block = 2 * 2 * (length // ranks) * 4 * 4  # k and v of two heads, fp32
    for forward, backward in run(ranks, main):
        assert sorted(forward) == [("recv", block)] * (ranks - 1) + [("send", block)] * (ranks - 1)
        assert sorted(backward) == [("recv", block)] * (2 * ranks - 1) + [("send", block)] * (2 * ranks - 1)


def test_a_window_sends_only_the_halo() -> None:
    ranks, length, size = 4, 1024, 65

    def main(world: World) -> int:
        world = ring(world)
        shares = token_order("contiguous", length=length, parts=ranks)
        q, k, v = (torch.randn(1, 1, length // ranks, 4, device=world.device) for _ in range(3))
        rules = ScoreRules(causal() & window(size), 0.5)
        with world.record() as calls:
            exchange = DirectExchange(world, "ring", shares, rules.pattern)
            split_attention((q, k, v), tiles=TiledAttention(rules, queries=shares[world.rank]), exchange=exchange)
        return sum(record.bytes for record in calls if record.kind == "recv")

    assert run(ranks, main) == [0, *[64 * 2 * 4 * 4] * 3]
