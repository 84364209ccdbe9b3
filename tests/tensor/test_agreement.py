"""A split GPT and a plain one compute the same, whatever the scheme, with sizes that do not divide."""

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grid import Cell, Grid, ranks_of
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from tensor.plain import Attention
from tensor.splitting import SCHEMES, gpt_parts, split_agrees

UNEVEN = GPTConfig(vocabulary=13, context=7, layers=2, heads=3, width=9, mlp_ratio=1.6, bias=True)


def built(config: GPTConfig) -> nn.Module:
    torch.manual_seed(1)
    module = GPT(config).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return module


def tokens(rows: int, config: GPTConfig) -> list[Tensor]:
    torch.manual_seed(2)
    inputs, targets = torch.randint(0, config.vocabulary, (2, rows, config.context))
    targets[0, :2] = -100
    return [inputs, targets]


def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return next_token_loss(module(inputs), (inputs, targets))[0]


@pytest.mark.grid(Grid({"plan": tuple(SCHEMES.values()), "keep": (False, True)}, strength=1))
def test_the_loss_and_every_gradient_are_those_of_one_process(plan: str, keep: bool) -> None:
    split_agrees(
        built(UNEVEN),
        plan=plan,
        parts=gpt_parts(UNEVEN),
        batch=(tokens(5, UNEVEN), loss),
        keeps=keep,
    )


def of_eight(cell: Cell) -> bool:
    return ranks_of(cell["plan"]) == 8


@pytest.mark.parametrize("plan", ["tp=1", "tp=1 tp_mode=2d", "tp=1 tp_mode=3d", "tp=2 tp_mode=2.5d tp_depth=2"])
def test_a_grid_of_one_rank_is_the_plain_model(plan: str) -> None:
    split_agrees(built(UNEVEN), plan=plan, parts=gpt_parts(UNEVEN), batch=(tokens(5, UNEVEN), loss))


@pytest.mark.parametrize("plan", ["tp=2 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d"])
def test_frozen_parameters_stop_nothing_else(plan: str) -> None:
    model = built(UNEVEN)
    for name in ("embedding", "positions", "blocks.0.attention_norm", "blocks.0.attention.qkv", "blocks.1.mlp"):
        model.get_submodule(name).requires_grad_(False)
    split_agrees(model, plan=plan, parts=gpt_parts(UNEVEN), batch=(tokens(4, UNEVEN), loss))


@pytest.mark.grid(Grid({"plan": ("tp=2", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d")}, heavy=of_eight))
def test_autocast_computes_in_half_precision_as_it_does_on_one_process(plan: str) -> None:
    def autocast(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(module, batch)

    split_agrees(
        built(UNEVEN).float(), plan=plan, parts=gpt_parts(UNEVEN), batch=(tokens(4, UNEVEN), autocast), bound=0.03
    )


@pytest.mark.grid(Grid({"plan": ("tp=2 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d")}, heavy=of_eight))
def test_blocks_may_share_a_module(plan: str) -> None:
    model = built(UNEVEN)
    first, second = model.get_submodule("blocks").children()
    second.mlp, second.attention_norm = first.mlp, first.attention_norm
    parts = assign_roles(model, plan=Plan.parse(plan))
    split_agrees(model, plan=plan, parts=parts, batch=(tokens(5, UNEVEN), loss))


class Tempered(Attention):
    """With a temperature, a bias of the queries and a sink for every head."""

    def __init__(self) -> None:
        super().__init__(24, 3, kv_heads=3)
        self.temperature = nn.Parameter(torch.linspace(0.5, 2, 3).view(3, 1, 1))
        self.shift = nn.Parameter(torch.randn(3, 8))
        self.sink = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (matrix(x).unflatten(-1, (-1, 8)).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        scores = (q + self.shift[:, None]) @ k.transpose(-2, -1) * self.temperature
        sinks = self.sink.t()[:, None].expand(len(x), -1, x.size(1), -1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-2]
        output: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output


class Tempering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.blocks = nn.ModuleList([Tempered()])
        self.classes = nn.Linear(24, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers)
        classes: Tensor = self.classes(x + self.blocks[0](x))
        return classes


@pytest.mark.parametrize("plan", ["tp=2", "tp=3", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d"])
def test_what_there_is_for_each_head_is_shared_out_with_it(plan: str) -> None:
    torch.manual_seed(1)
    model = Tempering().double()
    roles = {name: part.role for name, part in assign_roles(model, plan=Plan.parse(plan)).items()}
    assert {roles[f"blocks.0.{name}"] for name in ("temperature", "shift", "sink")} == {"inner"}
    numbers = [torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(5))]
    split_agrees(
        model,
        plan=plan,
        parts=assign_roles(model, plan=Plan.parse(plan)),
        batch=(numbers, lambda module, inputs: module(*inputs).square().sum()),
    )


def test_checkpointed_blocks_move_as_they_did() -> None:
    def checkpointed(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        for block in module.get_submodule("blocks").children():
            block.forward = functools.partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False)
        return loss(module, batch)

    for plan in ("tp=3 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=8 tp_mode=3d"):
        split_agrees(built(UNEVEN), plan=plan, parts=gpt_parts(UNEVEN), batch=(tokens(5, UNEVEN), checkpointed))
