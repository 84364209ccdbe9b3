"""Cuts of models that tensor parallelism splits too, at places where the hidden states change their layout."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Cell, Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT
from meshwise.reference.gpt import Block
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.testing import agree, run
from tensor.plain import gpt

WIDTH, WORDS, TOKENS = 16, 24, 6
GRIDS = ("tp=4 tp_mode=2d", "tp=8 tp_mode=2.5d tp_depth=2", "tp=8 tp_mode=3d")


class Opening(nn.Module):
    """What comes before the blocks, in a module of its own: a stage without its parameters does not run its inside."""

    def __init__(self, body: GPT) -> None:
        super().__init__()
        self.words, self.positions = body.embedding, body.positions

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.positions is not None
        x: Tensor = self.words(tokens)
        opened: Tensor = x + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return opened


class Model(nn.Module):
    """Blocks of the reference GPT between dropouts, logits among them; without a head it returns its stream."""

    def __init__(self, *, head: bool, dropout: float = 0.0, opening: bool = False, tied: bool = False) -> None:
        super().__init__()
        body = gpt(layers=2, dropout=dropout)
        self.opening = Opening(body) if opening else None
        self.embedding = None if opening else body.embedding
        self.positions = None if opening else body.positions
        self.before, self.behind, self.last, self.dropped = (nn.Dropout(dropout) for _ in range(4))
        self.blocks, self.norm = body.blocks, body.norm
        self.head = body.head if head else None
        if tied:
            body.head.weight = body.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if self.opening is not None:
            x = self.opening(tokens)
        else:
            assert self.embedding is not None
            assert self.positions is not None
            x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(self.norm(self.behind(x)))
        return x if self.head is None else self.dropped(self.head(x))  # type: ignore[no-any-return]


class Several(nn.Module):
    """Returns what it makes of the hidden states after its logits, twice, of which the first may be another stage's."""

    def __init__(self, *returned: str) -> None:
        super().__init__()
        body = gpt(layers=2)
        self.embedding, self.blocks, self.norm, self.head = body.embedding, body.blocks, body.norm, body.head
        self.first = nn.Linear(WIDTH, WORDS) if "first" in returned else None
        self.dropped = nn.Dropout(0.3)
        self.returned = returned

    def forward(self, tokens: Tensor) -> Any:
        made = {"embedding": self.embedding(tokens)}
        x = made["embedding"].tanh()
        for block in self.blocks:
            x = block(x)
        made["norm"] = self.norm(x)
        if self.first is not None:
            made["first"] = self.dropped(self.first(made["norm"]))
        return [self.head(made["norm"]), *(made[name] for name in self.returned)]


def squares(output: Any, batch: Tensor) -> tuple[Tensor, int]:
    found = output if isinstance(output, list) else [output]
    return sum(((x - 0.1).square().sum() for x in found), torch.zeros(())), batch.numel()


def options_of(batch: Tensor, at: tuple[str, ...]) -> Options:
    return Options(example=batch, cut=CutOptions(at=at), clip_norm=0.5)


def agrees(model: nn.Module, plan: str, at: tuple[str, ...], *, length: int = TOKENS) -> None:
    """Trains like one process."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(WORDS, (8, length), generator=generator) for _ in range(2)]
    options = options_of(batches[0], at)
    expected = alone(copy.deepcopy(model), loss=squares, batches=batches, options=options, lr=1e-2)

    def main(world: World) -> Any:
        trainer = parallelize(copy.deepcopy(model), plan, loss=squares, world=world, options=options, lr=1e-2)
        steps = outcome(trainer, batches=batches)
        trainer.close()
        return steps

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)


def is_rehearsed(model: nn.Module, plan: str, at: tuple[str, ...]) -> None:
    batch, ranks = torch.zeros(8, TOKENS, dtype=torch.long), Plan.parse(plan).mesh().size
    rehearsed = rehearse(RehearsalSubject(model, squares, batch, options=options_of(batch, at)), plan=plan, ranks=ranks)
    assert all(rehearsed.steps[stage] for stage in range(len(at) + 1))


BARE, DROPPED, OPENED, TIED = "no head", "dropout", "dropout, and a module that opens", "the same, tied"
MODELS: dict[str, dict[str, Any]] = {
    BARE: {"head": False},
    DROPPED: {"head": True, "dropout": 0.3},
    OPENED: {"head": True, "dropout": 0.3, "opening": True},
    TIED: {"head": True, "dropout": 0.3, "opening": True, "tied": True},
}
PLACES = (
    (),
    ("positions",),
    ("blocks.0",),
    ("blocks.1",),
    ("norm",),
    ("head",),
    ("blocks.0", "norm"),
    ("norm", "head"),
)


def exists(cell: Cell) -> bool:
    model, scheme, at = cell["model"], cell["scheme"], cell["at"]
    if model == BARE and (not at or "head" in at):
        return False
    if model in (OPENED, TIED) and at != ("blocks.0",):
        return False
    if scheme in GRIDS[1:]:
        return model in (BARE, DROPPED) and at in (("blocks.0",), ("norm",))
    return scheme == GRIDS[0] or len(at) != 1


def ranks(cell: Cell) -> int:
    return ranks_of(plan_of(cell["scheme"], cell["at"]))


def plan_of(scheme: str, at: tuple[str, ...]) -> str:
    stages = len(at) + 1
    return f"{scheme} pp={stages} microbatches={stages}{' schedule=zb-h1' if stages > 2 else ''}"


GRID = Grid(
    {"model": tuple(MODELS), "scheme": (*GRIDS, "tp=2", "tp=2 sequence_parallel=1"), "at": PLACES},
    exists=exists,
    cost=ranks,
    strength=1,
    # Tied, what opens is in two stages besides; and a cut between two blocks is one behind the first.
    heavy=lambda cell: ranks(cell) > 8 or cell["model"] == OPENED or cell["at"] == ("blocks.1",),
)


def model_of(model: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(**MODELS[model]).double()


@pytest.mark.grid(GRID)
def test_neither_the_steps_nor_dropout_depend_on_the_stage(model: str, scheme: str, at: tuple[str, ...]) -> None:
    """Behind the last block's stage, what brings its tokens together has nothing but NaN."""
    agrees(model_of(model), plan_of(scheme, at), at)


@pytest.mark.grid(
    Grid(
        {**GRID.axes, "at": PLACES[4:]},
        exists=exists,
        cost=ranks,
        strength=1,
        # 2.5d is 2d but for the depth; a part of the tokens is what there is to lay out; a stage of the head with more
        # outputs is below.
        heavy=lambda cell: cell["scheme"] in (GRIDS[1], "tp=2") or cell["at"] in (("blocks.0", "norm"), ("head",)),
    )
)
def test_stages_of_split_models_are_rehearsed(model: str, scheme: str, at: tuple[str, ...]) -> None:
    is_rehearsed(model_of(model), plan_of(scheme, at), at)


def test_tokens_are_not_taken_for_features_of_the_same_number() -> None:
    agrees(model_of(BARE), f"{GRIDS[0]} pp=2 microbatches=2", ("blocks.0",), length=WIDTH // 2)


class Late(Block):
    """Drops what its MLP returns itself, as the last that it does."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.mlp_norm, self.mlp, self.late = block.mlp_norm, block.mlp, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.late(self.mlp(self.mlp_norm(x)))
        return output


def test_dropout_on_a_stage_without_matrices() -> None:
    torch.manual_seed(0)
    model = Model(head=False)
    model.blocks = nn.ModuleList(map(Late, model.blocks))  # type: ignore[arg-type]
    agrees(model.double(), "tp=2 sequence_parallel=1 pp=2 microbatches=2", ("blocks.1",))


RETURNED = Grid(
    {
        "scheme": (GRIDS[0], GRIDS[2], "tp=2 sequence_parallel=1", "tp=2 schedule=zb-h1"),
        "cut": (("blocks.1", "embedding"), ("blocks.0", "embedding"), ("head", "norm"), ("head", "first")),
    },
    exists=lambda cell: cell["scheme"] != GRIDS[2] or cell["cut"][0] == "head",
    strength=1,
    heavy=lambda cell: cell["scheme"] == GRIDS[2],
)


@pytest.mark.grid(RETURNED)
def test_returned_outputs_of_another_stage_have_their_full_shape(scheme: str, cut: tuple[str, str]) -> None:
    at, returned = cut
    torch.manual_seed(0)
    agrees(Several(returned).double(), f"{scheme} pp=2 microbatches=2", (at,))


@pytest.mark.parametrize("scheme", [GRIDS[0], "tp=2 schedule=zb-h1"])
def test_stages_with_outputs_of_another_stage_are_rehearsed(scheme: str) -> None:
    is_rehearsed(Several("norm", "first").double(), f"{scheme} pp=2 microbatches=2", ("head",))


@pytest.mark.parametrize("scheme", ["tp=2", GRIDS[0]])
def test_norms_without_parameters_are_split_on_every_stage(scheme: str) -> None:
    torch.manual_seed(0)
    model = gpt(layers=2)
    for block in model.blocks:
        block.mlp_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    agrees(model.double(), f"{scheme} pp=2 microbatches=2", ("blocks.1",))


@pytest.mark.parametrize(
    "plan, at",
    [("tp=2 sequence_parallel=1 pp=2", "head"), (f"{GRIDS[0]} pp=2", "head"), (f"{GRIDS[2]} pp=2", "norm")],
)
def test_gathered_parts_of_another_stage_are_not_predicted(plan: str, at: str) -> None:
    """The last block puts tokens together, and the end of the forward features, on stages that have neither."""

    class Keeps(Several):
        def forward(self, tokens: Tensor) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return [self.head(self.norm(x)), x]

    def first(output: Any, batch: Tensor) -> tuple[Tensor, int]:
        return output[0].square().sum(), batch.numel()

    batch = torch.zeros(8, TOKENS, dtype=torch.long)
    model = Keeps().double()

    def main(world: World, words: str = plan) -> Any:
        options = Options(example=batch, cut=CutOptions(at=(at,) if "pp" in words else ()))
        trainer = parallelize(copy.deepcopy(model), words, loss=first, world=world, options=options, lr=1e-2)
        trainer.step(batch)
        return trainer.predict(batch)

    ranks = Plan.parse(plan).mesh().size
    if at == "head":
        with pytest.raises(PlanError, match="predict would return NaN in 1: "):
            run(ranks, main)
    else:
        [expected] = run(1, lambda world: main(world, "dp=1"))
        for output in run(ranks, main):
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
