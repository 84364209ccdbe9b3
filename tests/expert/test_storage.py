"""Test that experts are stored once over the ranks, and move between plans in checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from expert.test_agreement import batches, build, training
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, alone, count, run


def trainer_of(world: World, plan: str) -> Trainer:
    return parallelize(lambda: build("top-2", tied=False), plan, world=world, **training())


@pytest.mark.parametrize(
    "before, after",
    [
        ("dp=4 ep=4 zero=3", "dp=2 tp=2 ep=2 etp=2 zero=1"),
        ("dp=2 tp=2 ep=2 etp=2 zero=1", "dp=1"),
        ("dp=1", "pp=2 dp=2 ep=2 zero=2 microbatches=2"),
        ("pp=2 dp=2 ep=2 zero=2 microbatches=2", "dp=4 ep=2"),
    ],
)
def test_a_checkpoint_is_loaded_under_another_division_of_the_experts(before: str, after: str, tmp_path: Path) -> None:
    first, second = batches()

    def save(world: World) -> None:
        trainer = trainer_of(world, before)
        trainer.step(first)
        trainer.save(tmp_path / "saved")
        trainer.close()

    def load(world: World) -> Any:
        trainer = trainer_of(world, after)
        trainer.load(tmp_path / "saved")
        trainer.step(second)
        found = {name: value.clone() for name, value in trainer.full_parameters()}
        trainer.close()
        return found

    run(Plan.parse(before).mesh().size, save)
    expected = alone(lambda: build("top-2", tied=False), batches=batches(), **training())[1]["parameters"]
    for found in run(Plan.parse(after).mesh().size, load):
        agree(found, expected, bound=1e-9)


@pytest.mark.parametrize("plan, part", [("dp=4 ep=2", 2), ("dp=4 ep=4", 4), ("dp=2 tp=2 ep=2 etp=2", 4), ("tp=2", 1)])
def test_a_rank_stores_its_part_of_the_experts(plan: str, part: int) -> None:
    def experts(world: World) -> int:
        trainer = trainer_of(world, plan)
        held = sum(p.numel() for name, p in trainer.model.named_parameters() if ".experts." in name)
        trainer.close()
        return held

    whole = sum(p.numel() for name, p in build("top-2", tied=False).named_parameters() if ".experts." in name)
    size = Plan.parse(plan).mesh().size
    assert run(size, experts) == [whole // part] * size


@pytest.mark.parametrize("microbatches", [1, 2])
def test_tokens_move_as_often_and_as_far_as_the_formula_says(microbatches: int) -> None:
    layers, features, choices, experts, tokens, ranks = 2, 8, 2, 4, 7 * 4, 2

    def moved(world: World) -> tuple[int, int]:
        trainer = trainer_of(world, f"dp=2 ep=2 microbatches={microbatches}")
        with trainer.world.record() as records:
            trainer.step(batches()[0])
        trainer.close()
        return next((calls, size) for name, (calls, size) in count(records).items() if name.startswith("all_to_all"))

    found = run(ranks, moved)
    # in each layer the counts, and the tokens of all choices there and back, forward and backward
    assert {calls for calls, _ in found} == {5 * layers * microbatches}
    counts = 8 * experts * ranks * layers * microbatches
    assert sum(size for _, size in found) == 4 * layers * tokens * choices * features * 8 + counts
