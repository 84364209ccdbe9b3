"""Test that copies of hot experts and a dispatch in parts give the numbers of one process, and move fewer rows."""

from typing import Any

import pytest
import torch
from torch import nn

from expert.test_agreement import batches, build, check, training
from grid import Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.model.find_mixtures import planned_mixtures
from meshwise.plan import Plan, PlanError
from meshwise.testing import count, run

TOKENS_WHOLE = (
    "dp=4 ep=2",
    "dp=4 ep=4",
    "dp=2 tp=2 ep=4",
    "dp=2 tp=2 ep=2 etp=2",
    "pp=2 dp=2 ep=2 schedule=zb-h1",
)
"""Ranks that have all tokens of a sample."""
COPIES = Grid(
    {
        "ranks": (*TOKENS_WHOLE, "dp=2 tp=2 ep=2 etp=2 sequence_parallel=1", "cp=2 ep=2"),
        "zero": (0, 1, 2, 3),
        "copies": ("replicate=1", "replicate=2", "dispatch_parts=2", "replicate=1 dispatch_parts=3"),
        "chunk": (0, 3),
        "kind": ("top-2", "noisy", "capacity", "expert-choice", "biased", "5 experts"),
        "rest": ("", "microbatches=3", "recompute=full", "recompute=selective", "offload=activations:cpu"),
    },
    cost=lambda cell: ranks_of(cell["ranks"]) * (2 if "microbatches" in cell["rest"] else 1),
    single=("ranks", "kind", "rest", "zero"),
    # a part of the tokens of a sample shows neither its capacity nor its expert's choice
    exists=lambda cell: cell["ranks"] in TOKENS_WHOLE or cell["kind"] not in ("capacity", "expert-choice"),
)


@pytest.mark.grid(COPIES)
def test_copies_of_hot_experts_are_one_process(
    ranks: str, zero: int, copies: str, chunk: int, kind: str, rest: str
) -> None:
    check(f"{ranks} zero={zero} {copies} chunk={chunk} {rest}", kind)


def skewed(world: World, plan: str) -> tuple[int, dict[str, tuple[int, int]], dict[str, float]]:
    """Return rows, collectives and imbalance of a step in which every token chooses expert 0, and an expert in turn."""
    trainer = parallelize(lambda: build("top-2", tied=False), plan, world=world, **training())
    for block in (0, 1):
        router = trainer.model.get_submodule(f"blocks.{block}.mlp.router")

        def choose(_module: Any, _given: Any, output: Any) -> Any:
            index = torch.zeros_like(output[0])
            index.view(-1, 2)[:, 1] = torch.arange(index.numel() // 2) % 3 + 1
            return index, *output[1:]

        router.register_forward_hook(choose)
    with trainer.world.record() as records:
        trainer.step((batches()[0][0][:6], batches()[0][1][:6]))
    experts: Any = trainer.model.get_submodule("blocks.0.mlp.experts")
    found = experts.sharding.exchange.received, dict(count(records)), dict(trainer.expert_imbalances())
    trainer.close()
    return found


def test_copies_of_a_hot_expert_even_out_the_rows_of_the_ranks() -> None:
    """12 tokens of each rank: 12 pairs for expert 0, 4 for each other expert; ranks hold experts 0 and 1, 2 and 3."""
    plain, copied = run(2, skewed, args=("dp=2 ep=2",)), run(2, skewed, args=("dp=2 ep=2 replicate=1",))
    assert [rows for rows, _, _ in plain] == [32, 16]
    assert [rows for rows, _, _ in copied] == [12 + 8, 12 + 16]
    assert [loads for _, _, loads in plain] == [loads for _, _, loads in copied]  # of the router, not of the ranks
    layers, features, experts, ranks = 2, 8, 4, 2
    for found, pairs in ((plain, 48), (copied, 24)):
        moved = [each for _, counted, _ in found for name, each in counted.items() if name.startswith("all_to_all")]
        assert {calls for calls, _ in moved} == {5 * layers}
        assert sum(size for _, size in moved) == 4 * layers * pairs * features * 8 + layers * experts * ranks * 8
    for name in ("all_gather[dp]", "reduce_scatter[dp]"):  # two matrices of expert 0, and their gradients
        assert [counted[name] for _, counted, _ in copied] == [(2 * layers, layers * 2 * 8 * 16 * 8)] * ranks


def test_a_rank_without_a_pair_for_a_hot_expert_takes_part_in_its_backward() -> None:
    def built() -> nn.Module:
        model = build("top-2", tied=False)
        for block in (0, 1):  # a parameter that no forward reads
            model.get_submodule(f"blocks.{block}.mlp.experts").register_parameter(
                "unread", nn.Parameter(torch.zeros(4, 8, dtype=torch.float64))
            )
        return model

    def main(world: World) -> list[float]:
        trainer = parallelize(built, "dp=2 ep=2 replicate=1", world=world, **training())
        for block in (0, 1):
            router = trainer.model.get_submodule(f"blocks.{block}.mlp.router")
            own = torch.tensor([0, 1] if world.rank == 0 else [2, 3], device=world.device)
            router.register_forward_hook(
                lambda _m, _g, output, own=own: (own.expand_as(output[0]).clone(), *output[1:])
            )
        return [trainer.step(batches()[0]).loss for _ in range(2)]

    first, second = run(2, main)
    assert first == second


REFUSED = {
    "dp=2 replicate=1": "only ep moves tokens to experts.*'dp=2'",
    "dp=2 dispatch_parts=2": "only ep moves tokens to experts.*'dp=2'",
    "dp=2 ep=2 dispatch=all-gather replicate=1": "all-gather moves the tokens of all experts",
    "dp=2 ep=2 dispatch=all-gather dispatch_parts=2": "all-gather moves all tokens at once",
    "dp=2 ep=2 replicate=4": "replicate=4: blocks.0.mlp.experts has only 4 experts.*'replicate=0'",
}


@pytest.mark.parametrize("plan", REFUSED)
def test_copies_that_cannot_be_made_are_refused(plan: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[plan]):
        planned_mixtures(build("top-2", tied=False), plan=Plan.parse(plan))
