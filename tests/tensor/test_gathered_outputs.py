"""Hidden states and attention scores that a model returns from its blocks are whole, and may be trained on."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, run

WIDTH, WORDS, TOKENS = 16, 11, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2)), scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, scores = self.attention(self.norm(x))
        return x + y + self.down(torch.tanh(self.up(x + y))), scores


class Model(nn.Module):
    """Returns what every block gives beside its logits."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS) if head else nn.Identity()

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x: Tensor = self.embedding(tokens)
        hidden, scores = [x], []
        for block in self.blocks:
            x, weights = block(x)
            hidden.append(x)
            scores.append(weights)
        x = self.norm(x)
        return {"logits": self.head(x), "hidden": (*hidden, x), "scores": tuple(scores)}


def loss(output: dict[str, Any], batch: Tensor) -> tuple[Tensor, int]:
    """Of everything, in a way that needs all features, all tokens and all heads of it."""
    total = functional.log_softmax(output["logits"], dim=-1)[..., 3].sum()
    for x in output["hidden"]:
        total = total + functional.normalize(x, dim=-1).cumsum(1)[..., :3].sum()
    for x in output["scores"]:
        total = total + (x.sum(1).square() + x[:, 0]).sum()
    return total, batch.numel()


PLANS = [
    "tp=2",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d",
    "tp=8 tp_mode=3d",
    "tp=2 pp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d pp=2",
]


# Cuts between grids of ranks are in the tests of cuts.
@pytest.mark.grid(Grid({"plan": PLANS, "head": (True, False)}, strength=1, heavy=lambda cell: "2d pp" in cell["plan"]))
def test_hidden_states_and_scores_are_returned_whole(plan: str, head: bool) -> None:
    model = Model(head=head).double()
    rows = 5 if plan != "tp=8 tp_mode=3d" else 8
    batches = [torch.randint(0, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(1))]

    def main(world: World) -> Any:
        trainer = parallelize(
            copy.deepcopy(model), plan, loss=loss, world=world, lr=1e-2, options=Options(example=batches[0])
        )
        start, stop = trainer.share(rows)
        found = trainer.predict(batches[0][start:stop])
        with torch.no_grad():
            expected = model(batches[0][start:stop])
        agree({**found, "logits": found["logits"] + 0}, expected, bound=1e-10)
        return outcome(trainer, batches=batches)

    expected = alone(model, loss=loss, batches=batches, lr=1e-2)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)
