"""Test that experts are stored once over the ranks, and move between plans in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expert.test_agreement import batches, build, training
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, alone, count, run, whole


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


@pytest.mark.parametrize("plan", ["dp=2 ep=2", "tp=2 ep=2", "tp=2 etp=2", "pp=2 dp=2 ep=2 microbatches=2"])
def test_the_busiest_expert_is_the_same_under_every_plan(plan: str) -> None:
    batch = batches()[0][0][:4], batches()[0][1][:4]  # four rows: no rank runs a spare row

    def loads(world: World) -> dict[str, float]:
        trainer = trainer_of(world, plan)
        trainer.step(batch)
        found = dict(trainer.expert_imbalances())
        assert trainer.expert_imbalances() == {}
        trainer.close()
        return found

    chosen: dict[str, torch.Tensor] = {}
    model = whole(lambda: build("top-2", tied=False), seed=0)
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        router = model.get_submodule(f"{name}.router")
        router.register_forward_hook(lambda _module, _args, output, name=name: chosen.update({name: output[0]}))
    model(batch[0])
    counts = {f"{name}.experts": index.flatten().bincount(minlength=4) for name, index in chosen.items()}
    expected = {name: float(count.max() / count.double().mean()) for name, count in counts.items()}
    for found in run(Plan.parse(plan).mesh().size, loads):
        assert found == pytest.approx(expected)
