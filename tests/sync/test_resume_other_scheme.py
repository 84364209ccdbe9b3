"""Test that a training resumes in the middle of a round under another scheme: all begin a new round with the mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.testing import agree, run
from sync.test_replay import batch, made

Settings = dict[str, Any]
STEPS = 6
OTHERS: list[tuple[str, Settings, str, Settings]] = [
    ("slowmo every=4", {}, "diloco every=4", {}),
    ("diloco every=4", {}, "slowmo every=4", {}),
    ("local every=4", {}, "diloco every=4", {}),
    ("diloco every=4", {}, "easgd every=4", {}),
    ("diloco every=4", {"delay": 3}, "diloco every=3", {"delay": 2}),
    ("diloco every=4", {"delay": 3}, "diloco every=4", {"delay": 1}),
    ("diloco every=4", {"fragments": 2}, "diloco every=4", {"fragments": 1}),
]


def begun(world: World, scheme: str, settings: Settings, folder: Path) -> None:
    trainer = made(world, f"dp=2 sync={scheme}", settings=settings)
    for number in range(STEPS):
        trainer.step(batch(number))
    trainer.save(folder)


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def new_round(world: World, scheme: str, settings: Settings, folder: Path) -> Any:
    """Load parameters and optimizer of the mean under a plan without replicas, then begin `scheme` with these."""
    trainer = made(world, f"dp=2 sync={scheme}", settings=settings)
    trainer.load(folder)
    first = parameters(trainer)
    for number in range(STEPS, STEPS + 8):
        trainer.step(batch(number))
    return first, parameters(trainer)


# A part has one scheme with an outer state before and after.
@pytest.mark.grid(Grid({"change": OTHERS}, heavy=lambda cell: cell["change"] in (OTHERS[0], OTHERS[3])))
def test_a_round_begins_anew_with_the_mean(change: tuple[str, Settings, str, Settings], tmp_path: Path) -> None:
    before, old, after, new = change
    run(2, begun, args=(before, old, tmp_path / "saved"))

    def mean_alone(world: World) -> None:  # the same checkpoint, loaded and saved by a plan that knows no rounds
        trainer = made(world, "dp=2", settings={})
        trainer.load(tmp_path / "saved")
        trainer.save(tmp_path / "mean")

    run(2, mean_alone)
    wanted = run(2, new_round, args=(after, new, tmp_path / "mean"))
    for (first, last), (first_wanted, last_wanted) in zip(
        run(2, new_round, args=(after, new, tmp_path / "saved")), wanted, strict=True
    ):
        agree(first, first_wanted, bound=1e-12)
        agree(last, last_wanted, bound=1e-9)


@pytest.mark.parametrize("before", ["", "sync=diloco every=4", "sync=local every=5"])
def test_the_first_steps_of_post_local_sgd_are_those_of_the_training(before: str, tmp_path: Path) -> None:
    """After step 6 of the training it agrees until step 8, as `after` says, then after step 12."""

    def main(world: World) -> list[int]:
        trainer = made(world, f"dp=2 {before}", settings={})
        for number in range(STEPS):
            trainer.step(batch(number))
        trainer.save(tmp_path / "saved")
        trainer = made(world, "dp=2 sync=local every=4", settings={"after": 8})
        trainer.load(tmp_path / "saved")
        equal = []
        for number in range(STEPS, STEPS + 8):
            trainer.step(batch(number))
            first, second = world.exchange(parameters(trainer))
            equal += [number + 1] * all(torch.equal(value, second[name]) for name, value in first.items())
        return equal

    assert run(2, main) == [[7, 8, 12]] * 2


@pytest.mark.parametrize("delays", [(1, 3), (0, 2)])
def test_a_longer_delay_begins_with_the_next_exchange(delays: tuple[int, int], tmp_path: Path) -> None:
    before, after = delays
    run(2, begun, args=("diloco every=4", {"delay": before}, tmp_path / "saved"))
    for _, last in run(2, new_round, args=("diloco every=4", {"delay": after}, tmp_path / "saved")):
        assert all(bool(torch.isfinite(value).all()) for value in last.values())


@pytest.mark.parametrize("wire", ["auto", "int8"])
def test_a_layer_that_was_frozen_at_the_save_begins_at_its_own_values(wire: str, tmp_path: Path) -> None:
    """Its last agreed parameters are not in the checkpoint: with zeros the next round would pull it there."""

    def layers(*, frozen: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        model[1].requires_grad_(not frozen)
        return model

    def main(world: World) -> list[tuple[Tensor, Tensor]]:
        given: Any = {"loss": lambda output, _: (output.square().sum(), len(output)), "world": world, "lr": 1e-3}
        plan, rows = f"dp=2 sync=diloco every=3 wire={wire}", torch.ones(4, 8, dtype=torch.float64)
        saved = parallelize(layers(frozen=True), plan, **given)
        saved.step(rows)
        saved.save(tmp_path / "saved")
        trainer = parallelize(layers(frozen=False), plan, **given)
        trainer.load(tmp_path / "saved")
        buckets = [bucket for unit in trainer.units for bucket in unit.buckets]
        return [(bucket.reduction_state["agreed"].clone(), bucket.owned_parameters.clone()) for bucket in buckets]

    for found in run(2, main):
        assert sum(torch.equal(agreed, own) for agreed, own in found) == 1  # of the layer that was frozen
        assert all((agreed - own).abs().max() < 2e-3 for agreed, own in found)
