"""Training with split tokens equals training on one process: loss, gradient norm, every gradient and parameter."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Grid
from last_outcome import alone, outcome
from meshwise import Options, Plan, World, parallelize
from meshwise.reference import GPT, GPTConfig
from meshwise.reference.gpt import next_token_loss
from meshwise.simulate.rehearsal import rehearse
from meshwise.testing import SavedForBackward, agree, run
from simulate.subjects import gpt_subject


def gpt(positions: str, kv_heads: int, dropout: float) -> GPT:
    config = GPTConfig(
        vocabulary=40,
        context=64,
        layers=2,
        heads=4,
        kv_heads=kv_heads,
        width=32,
        positions=positions,  # type: ignore[arg-type]
        dropout=dropout,
    )
    return GPT(config).double()


@cache
def batches(length: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(2):
        tokens = torch.randint(40, (5, length + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[0, : length // 2] = -100
        made.append((tokens[:, :-1].contiguous(), targets))
    return made


@cache
def single(positions: str, kv_heads: int, dropout: float, length: int) -> Any:
    return alone(lambda: gpt(positions, kv_heads, dropout), loss=next_token_loss, batches=batches(length), lr=1e-2)


def under(plan: str, model: Any, *, length: int, **options: Any) -> Any:
    ranks = Plan.parse(plan)
    size = (ranks.dp or 1) * ranks.tp * ranks.pp * ranks.cp

    def main(world: World) -> Any:
        trainer = parallelize(model, plan, loss=next_token_loss, world=world, lr=1e-2, options=Options(**options))
        return outcome(trainer, batches=batches(length))

    return run(size, main)[0]


@pytest.mark.grid(
    Grid(
        {
            "context": ("gather", "ring", "zigzag", "striped", "ulysses", "usp cp_heads=2", "window", "auto"),
            "cp": (2, 3, 4),
            "dp": (1, 2),
            "zero": (0, 1, 2, 3),
            "microbatches": (1, 2),
            "model": (("learned", 4, 0.2), ("rotary", 2, 0.0), ("rotary", 1, 0.2)),
            "length": (16, 13),
        },
        exists=lambda cell: not (cell["cp"] == 3 and cell["context"].startswith("u")),
        # four ranks show more than three where they share out heads, three more than two where they share out tokens
        heavy=lambda cell: (
            (cell["cp"] == 4 and not cell["context"].startswith("u"))
            or (cell["cp"] == 3 and cell["context"] in ("gather", "auto"))
        ),
        cost=lambda cell: cell["cp"] * cell["dp"] * cell["microbatches"],
        single=("zero", "microbatches", "dp", "length", "model"),
    )
)
def test_a_gpt_trains_as_on_one_process(
    context: str,
    cp: int,
    dp: int,
    zero: int,
    microbatches: int,
    model: tuple[str, int, float],
    length: int,
) -> None:
    plan = f"dp={dp} cp={cp} context={context} zero={zero} microbatches={microbatches}"
    found = under(plan, lambda: gpt(*model), length=length)
    agree(found, single(*model, length), bound=1e-9)


@pytest.mark.grid(
    Grid(
        {
            "context": ("zigzag", "ulysses"),
            "tp": (1, 2),
            "pp": (1, 2),
            "sequence_parallel": (0, 1),
            "rest": ("", "recompute=full", "recompute=selective", "offload=optimizer:cpu,activations:cpu"),
            "zero": (0, 1, 3),
        },
        exists=lambda cell: cell["tp"] == 2 or not cell["sequence_parallel"],
        cost=lambda cell: cell["tp"] * cell["pp"] * (4 if cell["rest"] and cell["tp"] == 2 else 1),
        heavy=lambda cell: cell["tp"] == cell["pp"] == 1 and not cell["rest"],  # the test above has cp alone
        strength=1,
    )
)
def test_cp_with_tensor_and_pipeline_parallelism(
    context: str, tp: int, pp: int, sequence_parallel: int, rest: str, zero: int
) -> None:
    plan = f"cp=2 context={context} tp={tp} pp={pp} sequence_parallel={sequence_parallel} zero={zero} microbatches=2"
    options = {"example": batches(13)[0]} if pp > 1 else {}
    found = under(f"{plan} {rest}", lambda: gpt("rotary", 2, 0.2), length=13, **options)
    agree(found, single("rotary", 2, 0.2, 13), bound=1e-9)


@pytest.mark.parametrize("context", ["zigzag", "ulysses"])
def test_a_rank_saves_its_share_of_the_activations(context: str) -> None:
    ranks, length = 4, 64
    tokens = torch.randint(40, (2, length), generator=torch.Generator().manual_seed(2))
    model = gpt("rotary", 4, 0.0)
    with SavedForBackward(model) as whole:
        next_token_loss(model(tokens), (tokens, tokens))

    def main(world: World) -> int:
        trainer = parallelize(
            lambda: gpt("rotary", 4, 0.0), f"cp={ranks} context={context}", loss=next_token_loss, world=world
        )
        with SavedForBackward(trainer.model) as saved:
            trainer.step((tokens, tokens))
        return saved.bytes

    assert max(run(ranks, main)) <= 1.1 * whole.bytes / ranks


def test_a_rehearsal_counts_the_tokens_of_all_ranks() -> None:
    tokens = {plan: rehearse(gpt_subject(), plan=plan, ranks=4).tokens for plan in ("dp=4", "cp=2 dp=2", "cp=4")}
    assert set(tokens.values()) == {tokens["dp=4"]}
