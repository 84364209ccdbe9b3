"""Code outside of the blocks works on hidden states: a head tied by use, tables of its own, other widths."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.testing import agree, run
from tensor.plain import gpt

WIDTH, WORDS, TOKENS = 16, 24, 6


class Model(nn.Module):
    """Blocks of the reference GPT between what a test wants: a `head` that is a module or a product with the table's
    weight, positions that are a buffer or a parameter, and a detour through another width."""

    def __init__(self, *, head: str = "module", positions: str = "", detour: bool = False) -> None:
        super().__init__()
        body = gpt()
        self.embedding, self.blocks = body.embedding, body.blocks
        self.norm = nn.LayerNorm(WIDTH)
        self.how = head
        self.head = nn.Linear(WIDTH, WORDS) if head == "module" else None
        table = torch.randn(1, TOKENS + 2, WIDTH)
        if positions == "buffer":
            self.register_buffer("positions", table)
        else:
            self.positions = nn.Parameter(table) if positions == "parameter" else None
        self.detour = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)) if detour else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions[:, : tokens.size(1)]
        if self.detour is not None:
            x = x + self.detour(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)  # type: ignore[no-any-return]
        weight = self.embedding.weight
        if self.how == "again":
            return checkpoint(lambda y: functional.linear(y, weight=self.embedding.weight), x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "linear":
            return functional.linear(x, weight.to(x.dtype))
        return x @ (weight.transpose(0, 1) if self.how == "transpose" else weight.T)


TIED = [Model(head="linear"), Model(head="T"), Model(head="transpose"), Model(head="again")]
GRIDS = [Model(positions="buffer"), Model(detour=True), Model(positions="buffer", head="linear", detour=True)]


CASES = (
    *(("tp=2", model) for model in TIED),
    *(("tp=2 sequence_parallel=1 dp=2 zero=3", model) for model in TIED[:1]),
    *(("tp=4 tp_mode=2d", model) for model in (*TIED[:1], *GRIDS)),
    ("tp=8 tp_mode=3d", GRIDS[1]),
    ("tp=2 pp=2 microbatches=2", GRIDS[2]),
    ("tp=4 tp_mode=2d pp=2 microbatches=2", Model(positions="parameter")),
)


@pytest.mark.grid(
    Grid({"case": range(len(CASES))}, heavy=lambda cell: ranks_of(CASES[cell["case"]][0]) > 4),
)
def test_a_step_is_that_of_one_process(case: int) -> None:
    plan, model = CASES[case]
    model = copy.deepcopy(model).double()
    tokens = torch.randint(0, WORDS, (8, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    batches = [(tokens[:, :-1], tokens[:, 1:])]

    def main(world: World) -> Any:
        options = Options(example=batches[0])
        trainer = parallelize(copy.deepcopy(model), plan, loss=next_token_loss, world=world, lr=1e-2, options=options)
        return outcome(trainer, batches=batches)

    expected = alone(model, loss=next_token_loss, batches=batches, lr=1e-2)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)


READS = {
    "functional.embedding": lambda weight, tokens: functional.embedding(tokens, weight).sum(),
    "torch.embedding": lambda weight, tokens: torch.embedding(weight, tokens).sum(),
    "detach": lambda weight, _: weight.detach().mean(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_table_is_read_by_the_embedding_alone(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Other(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + read(self.embedding.weight, tokens)

    batch = torch.zeros(2, TOKENS, dtype=torch.int64)

    def main(world: World) -> Any:
        return parallelize(Other(), "tp=2", loss=next_token_loss, world=world, lr=1e-2).step((batch, batch))

    with pytest.raises(ValueError, match=r"an embedding's weight of 24 rows .* Call the embedding"):
        run(2, main)
