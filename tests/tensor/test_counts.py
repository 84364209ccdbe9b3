"""The traffic of each scheme is the published one: bytes by kind and axes of a block, forward and backward.

A block of width h with an MLP of 4 h has four matrices: qkv (h, 3h), projection (h, h), expansion (h, 4h), projection
(4h, h). Over them, the inputs of b·s tokens are 7 b·s·h elements, the outputs 9 b·s·h and the matrices 12 h².
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.trace_world import TraceWorld
from meshwise.plan import Plan
from meshwise.reference.gpt import Block, GPTConfig
from meshwise.tensor.matmul import Streaming
from meshwise.testing.count import Counts, count
from tensor.splitting import gpt_parts, install

H, TOKENS, HEADS, ROWS = 64, 16, 8, 64
B_S_H = ROWS * TOKENS * H
FREE, KEPT, PANELS = Streaming(), Streaming(keep=True), Streaming(panels=4)
STATISTICS = 2 * 2 * ROWS * TOKENS  # of two norms: two numbers a token


class Stream(nn.Module):
    """One block as a model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(config)])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks[0](x)
        return output


def traffic(plan: str, streaming: Streaming) -> tuple[Counts, Counts]:
    """The collectives of one rank's forward and backward of a block, in elements."""
    config = GPTConfig(width=H, heads=HEADS, layers=1, mlp_ratio=4)
    mesh = Plan.parse(plan).mesh()
    world = TraceWorld(rank=mesh.size - 1, mesh=mesh)
    with torch.device("meta"):
        model = Stream(config)
    parts = {name: part for name, part in gpt_parts(config).items() if name.startswith("blocks")}
    install(model, plan=plan, world=world, parts=parts, streaming=streaming)
    rows = ROWS // world.group(Plan.parse(plan).data_axes).size
    features = H if Plan.parse(plan).tp_mode == "1d" else H // mesh.axes[-1][1]
    x = torch.empty(rows, TOKENS, features, device="meta", requires_grad=True)
    with world.record() as forward:
        y = model(x)
    with world.record() as backward:
        y.backward(torch.empty_like(y))
    return count(forward), count(backward)


def elements(counts: Counts) -> Mapping[str, int]:
    """By kind and axes; float32."""
    return {name: size // 4 for name, (_, size) in counts.items()}


@pytest.mark.parametrize("streaming", [FREE, KEPT], ids=["free", "kept"])
def test_1d_sums_the_stream_twice_a_pass(streaming: Streaming) -> None:
    forward, backward = traffic("tp=4", streaming)
    assert dict(forward) == dict(backward) == {"all_reduce[tp]": (2, 2 * 4 * B_S_H)}


@pytest.mark.parametrize("streaming, again", [(FREE, 2), (KEPT, 0)], ids=["free", "kept"])
def test_1d_with_sequence_parallel_gathers_and_scatters_instead(streaming: Streaming, again: int) -> None:
    forward, backward = traffic("tp=4 sequence_parallel=1", streaming)
    ends = B_S_H  # where the blocks begin and end, once a model
    assert elements(forward) == {"all_gather[tp]": 2 * B_S_H + ends, "reduce_scatter[tp]": 2 * B_S_H}
    assert elements(backward) == {"all_gather[tp]": (2 + again) * B_S_H + ends, "reduce_scatter[tp]": 2 * B_S_H}


@pytest.mark.parametrize("q, depth", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3)])
def test_2d_and_25d_move_as_much_as_optimus_and_tesseract_say(q: int, depth: int) -> None:
    plan = f"tp={q * q * depth} tp_mode=2.5d tp_depth={depth}" if depth > 1 else f"tp={q * q} tp_mode=2d"
    rows = ROWS // (q * depth) * q * depth  # those of the ranks, where they do not divide
    inputs, matrices = 7 * B_S_H * rows // ROWS // (q * depth), 12 * H * H // q
    numbers = STATISTICS * rows // ROWS // (q * depth)
    forward, backward = traffic(plan, FREE)
    assert elements(forward) == {"all_gather[col]": inputs + q * numbers, "all_gather[row]": matrices}
    assert elements(backward) == {
        "all_gather[col]": inputs,
        "all_gather[row]": matrices,
        "reduce_scatter[col]": inputs,
        "reduce_scatter[row]": matrices,
        "all_reduce[col]": numbers,
    }
    _, backward = traffic(plan, KEPT)
    assert elements(backward) == {
        "reduce_scatter[col]": inputs,
        "reduce_scatter[row]": matrices,
        "all_reduce[col]": numbers,
    }


@pytest.mark.parametrize("p", [2, 4])
def test_3d_moves_a_square_of_the_sides_less(p: int) -> None:
    forward, backward = traffic(f"tp={p**3} tp_mode=3d", KEPT)
    whole, numbers = B_S_H // p**2, STATISTICS // p**2
    # Of the two pairs, the first linears read h and write 3 h and 4 h, the second ones read h and 4 h and write h.
    assert elements(forward) == {
        "all_gather[i]": 12 * H * H // p**2,
        "all_gather[j]": 2 * whole,
        "reduce_scatter[l]": 7 * whole,
        "all_gather[l]": 5 * whole + p * numbers,
        "reduce_scatter[j]": 2 * whole,
    }
    assert elements(backward) == {
        "reduce_scatter[i]": 12 * H * H // p**2,
        "reduce_scatter[j]": 2 * whole,
        "all_gather[l]": 7 * whole,
        "reduce_scatter[l]": 5 * whole,
        "all_gather[j]": 2 * whole,
        "all_reduce[l]": numbers,
    }


@pytest.mark.parametrize("plan", ["tp=4 sequence_parallel=1", "tp=16 tp_mode=2d", "tp=8 tp_mode=3d"])
def test_panels_move_the_same_in_more_and_smaller_calls(plan: str) -> None:
    for whole, streamed in zip(traffic(plan, FREE), traffic(plan, PANELS), strict=True):
        assert elements(whole) == elements(streamed)
        assert sum(calls for calls, _ in whole.values()) < sum(calls for calls, _ in streamed.values())
