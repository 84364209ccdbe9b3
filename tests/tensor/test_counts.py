"""The traffic of each scheme is the published one: bytes by kind and axes of a block, forward and backward.

A block of width h with an MLP of 4 h has four matrices: qkv (h, 3h), projection (h, h), expansion (h, 4h), projection
(4h, h). Over them, the inputs of b·s tokens are 7 b·s·h elements, the outputs 9 b·s·h and the matrices 12 h²."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.pipeline.run.stage_backward import backward_input
from meshwise.plan import Plan
from meshwise.reference.gpt import Block, GPTConfig
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.testing import Counts, SavedForBackward, count
from tensor.splitting import install

H, TOKENS, HEADS, ROWS = 64, 16, 8, 64
B_S_H = ROWS * TOKENS * H
FREE, KEPT = False, True
STATISTICS = 2 * 2 * ROWS * TOKENS  # of two norms: two numbers a token


CONFIG = GPTConfig(width=H, heads=HEADS, layers=1, mlp_ratio=4)


class Stream(nn.Module):
    """One block as a model, whose embedding and head are left out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])
        self.embedding, self.head = nn.Embedding(2, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks[0](x)
        return output


def one_matrix() -> nn.Module:
    return Stream(Block(CONFIG))


class Gated(nn.Module):
    """A block as users write it: what its first matrices read is a variable, and they may be one or several."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = HEADS, fused
        self.norm, self.mlp_norm = nn.LayerNorm(H), nn.LayerNorm(H)
        if fused:
            self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
            self.gate_up = nn.Linear(H, 4 * H)
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))
            self.gate, self.up = (nn.Linear(H, 2 * H) for _ in range(2))
        self.down = nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = self.qkv(y).chunk(3, dim=-1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (part.unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for part in parts)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        gate, up = self.gate_up(y).chunk(2, dim=-1) if self.fused else (self.gate(y), self.up(y))
        output: Tensor = x + self.down(functional.silu(gate) * up)
        return output


class GatedModel(Stream):
    """Has a head behind its block: what the block makes of split hidden states may not leave the model split."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks[0](x))
        return logits


def gated(*, fused: bool) -> nn.Module:
    return GatedModel(Gated(fused=fused))


def hidden_states(world: TraceWorld, plan: str, *, device: str = "meta") -> Tensor:
    """What one rank has of a block's input."""
    rows = ROWS // world.group(Plan.parse(plan).row_axes).size
    features = H if Plan.parse(plan).tp_mode == "1d" else H // world.mesh.axes[-1][1]
    return torch.zeros(rows, TOKENS, features, device=device, requires_grad=True)


def split(plan: str, keeps: bool, build: Callable[[], nn.Module]) -> tuple[TraceWorld, nn.Module, Tensor]:
    """A block on the last rank of its world, and its input."""
    mesh = Plan.parse(plan).mesh()
    world = TraceWorld(rank=mesh.size - 1, mesh=mesh)
    with torch.device("meta"):
        model = build()
    install(model, plan=plan, world=world, parts=assign_roles(model, plan=Plan.parse(plan)), keeps=keeps)
    return world, model, hidden_states(world, plan)


def traffic(plan: str, keeps: bool, build: Callable[[], nn.Module] = one_matrix) -> tuple[Counts, Counts]:
    """The collectives of one rank's forward and backward of a block, in elements."""
    world, model, x = split(plan, keeps, build)
    with world.record() as forward:
        y = model(x)
    with world.record() as backward:
        y.backward(torch.empty_like(y))
    return count(forward), count(backward)


def traffic_in_parts(plan: str, keeps: bool = FREE) -> tuple[Counts, Counts]:
    """The same of a backward in two parts, I and W."""
    world, model, x = split(plan, keeps, one_matrix)
    y = model(x)
    with world.record() as inputs:
        later = backward_input([y], gradients=[torch.empty_like(y)], received=[x], parameters=model.parameters())
    with world.record() as weights:
        later.run()
    return count(inputs), count(weights)


def elements(counts: Counts) -> Mapping[str, int]:
    """By kind and axes; float32."""
    return {name: size // 4 for name, (_, size) in counts.items()}


@pytest.mark.parametrize("keeps", [FREE, KEPT], ids=["free", "kept"])
def test_1d_sums_the_stream_twice_a_pass(keeps: bool) -> None:
    forward, backward = traffic("tp=4", keeps)
    assert dict(forward) == dict(backward) == {"all_reduce[tp]": (2, 2 * 4 * B_S_H)}


def test_a_rank_does_its_part_of_a_sum_while_it_computes_the_gradient_of_the_weight() -> None:
    mesh = Plan.parse("tp=4").mesh()
    world, came = TraceWorld(rank=0, mesh=mesh), list[int]()

    def progress() -> None:
        came.append(len(records))

    vars(world)["progress"] = progress
    with torch.device("meta"):
        model = one_matrix()
    install(model, plan="tp=4", world=world, parts=assign_roles(model, plan=Plan.parse("tp=4")), keeps=FREE)
    y = model(hidden_states(world, "tp=4"))
    with world.record() as records:
        y.backward(torch.empty_like(y))
    assert {1, 2} <= set(came)


@pytest.mark.parametrize("keeps, again", [(FREE, 2), (KEPT, 0)], ids=["free", "kept"])
def test_1d_with_sequence_parallel_gathers_and_scatters_instead(keeps: bool, again: int) -> None:
    forward, backward = traffic("tp=4 sequence_parallel=1", keeps)
    ends = B_S_H  # where the blocks begin and end, once a model
    assert elements(forward) == {"all_gather[tp]": 2 * B_S_H + ends, "reduce_scatter[tp]": 2 * B_S_H}
    assert elements(backward) == {"all_gather[tp]": (2 + again) * B_S_H + ends, "reduce_scatter[tp]": 2 * B_S_H}


@pytest.mark.parametrize("q, depth", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3)])
def test_2d_and_25d_move_as_much_as_optimus_and_tesseract_say(q: int, depth: int) -> None:
    plan = f"tp={q * q * depth} tp_mode=2.5d tp_depth={depth}" if depth > 1 else f"tp={q * q} tp_mode=2d"
    rows = ROWS // (q * depth) * q * depth  # those of the ranks, where they do not divide
    inputs, matrices = 7 * B_S_H * rows // ROWS // (q * depth), 12 * H * H // q
    numbers = STATISTICS * rows // ROWS // (q * depth)
    end = B_S_H * rows // ROWS // (q * depth)  # where hidden states leave the model, which is once
    forward, backward = traffic(plan, FREE)
    assert elements(forward) == {"all_gather[col]": inputs + end + q * numbers, "all_gather[row]": matrices}
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
    end = whole  # where hidden states leave the model, which is once
    # Of the two pairs, the first linears read h and write 3 h and 4 h, the second ones read h and 4 h and write h.
    assert elements(forward) == {
        "all_gather[i]": 12 * H * H // p**2,
        "all_gather[j]": 2 * whole,
        "reduce_scatter[l]": 7 * whole,
        "all_gather[l]": 5 * whole + end + p * numbers,
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


# ---- a backward in two parts: I gathers W and reduces dX, W gathers X and reduces dW, both gather dY -----------------


def test_1d_in_two_parts_moves_no_more() -> None:
    first, second = traffic_in_parts("tp=4")
    assert dict(first) == {"all_reduce[tp]": (2, 2 * 4 * B_S_H)}
    assert not second


@pytest.mark.parametrize("keeps, again", [(FREE, 2), (KEPT, 0)], ids=["free", "kept"])
def test_sequence_parallel_in_two_parts_gathers_the_gradient_twice(keeps: bool, again: int) -> None:
    first, second = traffic_in_parts("tp=4 sequence_parallel=1", keeps)
    ends = B_S_H
    assert elements(first) == {"all_gather[tp]": 2 * B_S_H + ends, "reduce_scatter[tp]": 2 * B_S_H}
    assert elements(second) == {"all_gather[tp]": (2 + again) * B_S_H}


@pytest.mark.parametrize("plan", ["tp=16 tp_mode=2d", "tp=8 tp_mode=2.5d tp_depth=2"])
def test_2d_and_25d_in_two_parts_move_no_more(plan: str) -> None:
    first, second = traffic_in_parts(plan)
    shares = Plan.parse(plan).mesh().degree("row") * Plan.parse(plan).tp_depth
    inputs, matrices = 7 * B_S_H // shares, 12 * H * H // Plan.parse(plan).mesh().degree("row")
    assert elements(first) == {
        "all_gather[row]": matrices,
        "reduce_scatter[col]": inputs,
        "all_reduce[col]": STATISTICS // shares,
    }
    assert elements(second) == {"all_gather[col]": inputs, "reduce_scatter[row]": matrices}
    _, second = traffic_in_parts(plan, KEPT)
    assert elements(second) == {"reduce_scatter[row]": matrices}


@pytest.mark.parametrize("p", [2, 4])
def test_3d_in_two_parts_gathers_the_gradient_twice(p: int) -> None:
    first, second = traffic_in_parts(f"tp={p**3} tp_mode=3d", KEPT)
    whole = B_S_H // p**2
    assert elements(first) == {
        "all_gather[l]": 7 * whole,
        "reduce_scatter[l]": 5 * whole,
        "all_gather[j]": 2 * whole,
        "reduce_scatter[j]": 2 * whole,
        "all_reduce[l]": STATISTICS // p**2,
    }
    assert elements(second) == {
        "all_gather[l]": 7 * whole,
        "all_gather[j]": 2 * whole,
        "reduce_scatter[i]": 12 * H * H // p**2,
    }


EVERY = ("tp=4", "tp=4 sequence_parallel=1", "tp=16 tp_mode=2d", "tp=8 tp_mode=2.5d tp_depth=2", "tp=8 tp_mode=3d")


@pytest.mark.parametrize("keeps", [FREE, KEPT], ids=["free", "kept"])
@pytest.mark.parametrize("plan", EVERY)
def test_matrices_that_read_one_tensor_move_and_keep_what_one_matrix_would(plan: str, keeps: bool) -> None:
    one, several = (traffic(plan, keeps, partial(gated, fused=fused)) for fused in (True, False))
    assert [elements(counts) for counts in several] == [elements(counts) for counts in one]
    if not keeps:
        assert saved(plan, fused=False) == saved(plan, fused=True)


def saved(plan: str, *, fused: bool) -> int:
    """Bytes that a forward of a block leaves for its backward, on one rank."""
    mesh = Plan.parse(plan).mesh()
    world, model = TraceWorld(rank=0, mesh=mesh, device="cpu"), gated(fused=fused)
    install(model, plan=plan, world=world, parts=assign_roles(model, plan=Plan.parse(plan)))
    with SavedForBackward(model) as kept:
        model(hidden_states(world, plan, device="cpu"))
    return kept.bytes
