"""The gradient of an argument of an attention is summed over its heads once, wherever the argument is trained."""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Cell, Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.testing import agree, run
from tensor.splitting import split_agrees

WORDS, WIDTH, HEADS, TOKENS = 13, 12, 4, 5
SCHEMES = ("tp=2", "tp=4", "tp=2 sequence_parallel=1", "tp=4 sequence_parallel=1", "tp=4 tp_mode=2d")
GRIDS = ("tp=8 tp_mode=2.5d tp_depth=2", "tp=8 tp_mode=3d")
TRAINED = (
    *("tp=2 sequence_parallel=1 recompute=full zero=1", "tp=2 sequence_parallel=1 recompute=selective zero=2"),
    *("tp=2 dp=2 sequence_parallel=1 zero=3", "tp=2 pp=2 sequence_parallel=1 microbatches=2", "tp=4 tp_mode=2d zero=3"),
)


class Table(nn.Module):
    """What is added to scores, for how far apart two tokens are: (T, T). It reads no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Parameter(torch.randn(TOKENS))

    def forward(self, tokens: int) -> Tensor:
        places = torch.arange(tokens, device=self.far.device)
        found: Tensor = self.far[(places[:, None] - places).abs()]
        return found


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.inwards, self.outwards = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, distance: Tensor, warmth: Tensor | None) -> Tensor:
        q, k, v = self.inwards(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) + distance
        scores = scores if warmth is None else scores * warmth
        output: Tensor = self.outwards((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    def __init__(self, kind: str, table: Table) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        if kind == "shared":
            self.table = table
        elif kind != "plain":
            self.table = Table()
        if kind == "scalar":
            self.warmth = nn.Parameter(torch.tensor([1.2]))

    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        distance = far if self.kind == "plain" else self.table(TOKENS)
        if self.kind == "twice":
            distance = distance.softmax(-1) + self.table(TOKENS).tanh()
        elif self.kind == "stream":
            x = x * (1 + self.table(2).mean())
        x = x + self.mixer(self.norm(x), distance, self.warmth if self.kind == "scalar" else None)
        output: Tensor = x + self.down(functional.gelu(self.up(x)))
        return output


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.far, table = Table(), Table()
        self.layers = nn.ModuleList(Layer(kind, table) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x, far = self.words(tokens), self.far(TOKENS)
        for layer in self.layers:
            x = layer(x, far)
        logits: Tensor = self.head(x)
        return logits


def _given(kind: str) -> tuple[Model, dict[str, str], list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    model = Model(kind).double()
    rules = {"far": "whole"} | ({} if kind == "plain" else {"layers.*.table": "whole"})
    rules |= {"layers.*.warmth": "whole"} if kind == "scalar" else {}
    words = [torch.randint(0, WORDS, (2, 8, TOKENS)).unbind() for _ in range(2)]
    return model, rules, [{"tokens": tokens, "targets": targets} for tokens, targets in words]


def _loss(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    tokens, targets = inputs
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def _counted(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"]
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


KINDS = ("plain", "own", "shared", "twice", "scalar")


def ranks(cell: Cell) -> float:
    return ranks_of(cell["plan"])


@pytest.mark.grid(
    Grid(
        {"plan": (*SCHEMES, *GRIDS), "kind": KINDS},
        cost=ranks,
        strength=1,
        heavy=lambda cell: cell["plan"] == GRIDS[0],  # in the next test
    )
)
def test_a_table_of_a_block_gets_the_gradient_of_all_heads_once(plan: str, kind: str) -> None:
    model, rules, batches = _given(kind)
    parts = assign_roles(model, plan=Plan.parse(plan), rules=rules)
    split_agrees(model, plan=plan, parts=parts, batch=((batches[0]["tokens"], batches[0]["targets"]), _loss))


WIDE = {**dict.fromkeys(("tp=2", "tp=2 sequence_parallel=1"), WIDTH), **dict.fromkeys((*GRIDS, SCHEMES[-1]), 6)}
"""How many tokens are as many as the features that a rank has."""


@pytest.mark.grid(Grid({"plan": tuple(WIDE)}, heavy=lambda cell: cell["plan"] == GRIDS[1]))
def test_a_table_as_wide_as_hidden_states_is_another_argument(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", WIDE[plan])
    model, rules, batches = _given("plain")
    parts = assign_roles(model, plan=Plan.parse(plan), rules=rules)
    split_agrees(model, plan=plan, parts=parts, batch=((batches[0]["tokens"], batches[0]["targets"]), _loss))


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1", "tp=4 sequence_parallel=1"])
def test_a_table_used_by_scores_and_hidden_states_gets_the_gradients_of_both(plan: str) -> None:
    model, rules, batches = _given("stream")
    parts = assign_roles(model, plan=Plan.parse(plan), rules=rules)
    split_agrees(model, plan=plan, parts=parts, batch=((batches[0]["tokens"], batches[0]["targets"]), _loss))


@pytest.mark.grid(Grid({"plan": TRAINED}, heavy=lambda cell: cell["plan"] in (*TRAINED[1:3], TRAINED[4])))
def test_a_table_of_a_block_trains_as_on_one_process(plan: str) -> None:
    model, rules, batches = _given("own")
    given: dict[str, Any] = {"loss": _counted, "optimizer": torch.optim.AdamW, "lr": 1e-2}
    expected = alone(copy.deepcopy(model), batches=batches, **given)
    options = Options(tensor_rules=rules, example=batches[0])

    def main(world: World) -> Any:
        return outcome(parallelize(copy.deepcopy(model), plan, world=world, options=options, **given), batches=batches)

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)
