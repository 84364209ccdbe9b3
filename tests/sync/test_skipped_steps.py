"""Test replicas of which some or all skip steps, because their gradients are not finite (`nonfinite="skip:n"`).

all       a round without any update changes no bit of the parameters, the outer state and the optimizer's state
alone     a training continues from its checkpoint in equal bits, although replicas differ in their steps and skips"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer
from meshwise.optim import LAMB
from meshwise.testing import run

SKIPS = 4
SCHEMES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "reset": ("local", {"state": "reset"}),
    "slowmo": ("slowmo", {}),
    "diloco": ("diloco", {}),
    "blended": ("diloco", {"blend": 0.5}),
    "streaming": ("diloco", {"fragments": 2, "delay": 1, "blend": 0.5}),
    "easgd": ("easgd", {}),
    "gossip": ("gossip", {}),
}


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(19, 24), nn.Dropout(0.25), nn.Linear(24, 7)).double()


def square_loss(output: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - given[1]).square().mean(1).sum(), len(output)


def made(world: World, plan: str, settings: Mapping[str, Any], optimizer: Any = torch.optim.AdamW) -> Trainer:
    options = Options(sync=settings, nonfinite=f"skip:{SKIPS}")
    return parallelize(build, plan, loss=square_loss, world=world, options=options, lr=1e-2, optimizer=optimizer)


def step(trainer: Trainer, number: int, *, skips: bool = False) -> bool:
    """Train a step, of which this replica's rows are infinite if it `skips`; return whether it was skipped."""
    draw = torch.Generator().manual_seed(number)
    x, y = (torch.randn(5, width, generator=draw, dtype=torch.float64) for width in (19, 7))
    return trainer.step((x * torch.inf if skips else x, y)).skipped


def state(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the parameters, the outer state and the optimizer state of this replica."""
    for name, value in trainer.model.named_parameters():
        yield name, value.data.clone()
    for number, bucket in enumerate(bucket for unit in trainer.units for bucket in unit.buckets):
        for name, kept in bucket.reduction_state.items():
            yield f"{name} of bucket {number}", kept.clone()
        for part, (_, parameter) in enumerate(bucket.slices):
            for key, value in trainer.optimizer.state.get(parameter, {}).items():
                yield f"{key} of bucket {number}, slice {part}", torch.as_tensor(value).clone()


def require_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


MEAN = tuple(scheme for scheme in SCHEMES if scheme != "gossip")


@pytest.mark.grid(Grid({"scheme": MEAN, "wire": ("auto", "int8", "int4", "1bit", "topk:0.1")}, strength=1))
def test_a_round_that_all_skip_changes_no_bit(scheme: str, wire: str) -> None:
    name, settings = SCHEMES[scheme]

    def main(world: World) -> None:
        trainer = made(world, f"dp=2 sync={name} every=2 wire={wire}", settings)
        skipped = [step(trainer, number) for number in range(6)]
        if settings.get("delay"):  # exchanges of the last updates are applied in the round after them
            skipped += [step(trainer, number, skips=True) for number in (6, 7)]
        before = dict(state(trainer))
        skipped += [step(trainer, number, skips=True) for number in (8, 9)]
        assert sum(skipped) == len(skipped) - 6
        require_equal(dict(state(trainer)), before)
        assert not any([step(trainer, 10), step(trainer, 11)])
        assert not torch.equal(dict(state(trainer))["0.weight"], before["0.weight"])

    run(2, main)


OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "LAMB, averaged": LAMB}  # LAMB counts steps by group
ALONE = Grid(
    {"scheme": tuple(SCHEMES), "wire": ("auto", "int4"), "saved": (1, 2, 4, 5), "optimizer": tuple(OPTIMIZERS)},
    exists=lambda cell: cell["scheme"] != "gossip" or cell["wire"] == "auto",
    strength=1,
)


@pytest.mark.grid(ALONE)
def test_a_training_of_which_one_replica_skips_resumes_in_equal_bits(
    scheme: str, wire: str, saved: int, optimizer: str, tmp_path: Path
) -> None:
    """Replica 1 alone skips steps 1, 4 and 5, so its dropout and its optimizer count other steps."""
    name, settings = SCHEMES[scheme]

    def main(world: World) -> None:
        plan = f"dp=3 sync={name} every=3 wire={wire}"
        one, other = (made(world, plan, settings, OPTIMIZERS[optimizer]) for _ in range(2))
        for trainer in (one, other) if optimizer != "AdamW" else ():
            trainer.average(0.9)
        for number in range(1, saved + 1):
            step(one, number, skips=world.rank == 1 and number in (1, 4, 5))
        one.save(tmp_path / "saved")
        other.load(tmp_path / "saved")
        for number in range(saved + 1, 10):
            for trainer in (one, other):
                step(trainer, number, skips=world.rank == 1 and number in (4, 5))
            require_equal(dict(state(other)), dict(state(one)))

    run(3, main)


def test_each_replica_resumes_with_its_own_number_of_skips(tmp_path: Path) -> None:
    def main(world: World) -> int:
        trainer = made(world, "dp=2 sync=diloco every=9", {})
        for number in range(3):
            step(trainer, number, skips=world.rank == 1 and number > 0)
        trainer.save(tmp_path / "saved")
        trainer.load(tmp_path / "saved")
        for number in range(SKIPS + 1):
            try:
                step(trainer, number, skips=True)
            except NonFiniteError:
                return number
        return SKIPS + 1

    assert run(2, main) == [SKIPS, SKIPS - 2]
