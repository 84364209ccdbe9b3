"""Models that read values of positions and masks are cut and run in stages, given as a module or as a function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.testing import run


class _Block(nn.Module):
    """Computes where one of its numbers, of `asks`, is above 2."""

    def __init__(self, *, asks: str) -> None:
        super().__init__()
        self.up, self.down, self._asks = nn.Linear(4, 6), nn.Linear(6, 4), asks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        asked = torch.arange(x.size(1), device=x.device) if self._asks == "positions" else mask
        return x + self.down(self.up(x).relu()) if bool((asked > 2).any()) else x


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        found: Tensor = self.table(tokens)
        return found if bool((positions.diff() == 1).all()) else found * 2


class _Groups(nn.Module):
    """A group of rows with a matrix of its own: a product that torch knows, without values, in bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(1, 4, 4))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        ends = torch.tensor([len(rows)], dtype=torch.int32).to(x.device)
        return torch.nn.functional.grouped_mm(rows, self.weight, offs=ends).view(x.shape)


class _Mixed(nn.Module):
    """A table, and groups of what is in it: what it returns looks like nothing that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.groups = nn.Embedding(9, 4), _Groups()

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.groups(self.table(tokens), tokens)
        return x


class _Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], *, embedding: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4) if embedding is None else embedding()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def _loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["tokens"].flatten(), reduction="sum"), batch[
        "tokens"
    ].numel()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: _Model(lambda: _Block(asks="positions")),
    "mask": lambda: _Model(lambda: _Block(asks="mask")),
    "embedding": lambda: _Model(lambda: _Block(asks="positions"), embedding=_Tokens),
    "groups": lambda: _Model(_Groups),
    "groups elsewhere": lambda: _Model(lambda: _Block(asks="mask"), embedding=_Mixed),
}
BATCH = {"tokens": torch.arange(48).view(8, 6) % 9, "mask": torch.full((8, 6), 3)}


def _trained(world: World, build: Callable[[], nn.Module], plan: str) -> list[float]:
    trainer = parallelize(build, plan, loss=_loss, world=world, options=Options(example=BATCH, seed=3), lr=1e-2)
    return [trainer.step(BATCH).loss for _ in range(2)]


PLANS = ("pp=2 microbatches=2", "pp=2 microbatches=2 recompute=full")


@pytest.mark.grid(Grid({"model": tuple(MODELS), "plan": PLANS}, strength=1))
def test_a_function_whose_model_reads_values_trains_like_one_process(model: str, plan: str) -> None:
    whole = run(1, _trained, args=(MODELS[model], "dp=1"))[0]
    for losses in run(2, _trained, args=(MODELS[model], plan)):
        assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.grid(Grid({"model": tuple(MODELS), "given": ("module", "function")}, strength=1))
def test_a_model_that_reads_values_is_rehearsed(model: str, given: str) -> None:
    build = MODELS[model]
    assert rehearse(
        RehearsalSubject(build if given == "function" else build(), _loss, BATCH), plan="pp=2 microbatches=2", ranks=2
    ).steps[0]


class _Summed(nn.Module):
    """Asks what it is given, which blocks have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        higher: Tensor = self.up(x)
        return x + higher if bool((x.sum() > 0).any()) else higher


class _Found(nn.Module):
    """A table that tells which tokens there are, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), tokens


class _OfFound(_Model):
    """Its blocks ask for the integers that its embedding returns."""

    def __init__(self) -> None:
        super().__init__(lambda: _Block(asks="mask"), embedding=_Found)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x, found = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, found + mask)
        logits: Tensor = self.head(x)
        return logits


class _OfBlocks(_Model):
    """Hands its blocks what the one before has computed in place of a mask, as what needs no gradient."""

    def __init__(self) -> None:
        super().__init__(lambda: _Block(asks="mask"))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, x.detach() + mask[..., None])
        logits: Tensor = self.head(x)
        return logits


def _cut(world: World, build: Callable[[], nn.Module], mask: Tensor) -> None:
    example = {**BATCH, "mask": mask}
    parallelize(build, "pp=2 microbatches=2", loss=_loss, world=world, options=Options(example=example))


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "numbers": (lambda: _Model(_Summed), BATCH["mask"]),
    "numbers without a gradient": (_OfBlocks, BATCH["mask"]),
    "integers": (_OfFound, BATCH["mask"]),
    "numbers of the batch": (MODELS["mask"], BATCH["mask"].float()),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_reading_values_that_are_not_known_without_computing_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="cannot run without values"):
        run(2, _cut, args=UNKNOWN[case])
