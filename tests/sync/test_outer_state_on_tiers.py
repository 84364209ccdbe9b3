"""Test replicas whose outer state sleeps in the CPU's memory or on disk: equal bits as on the device."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from accelerator.simulated_accelerators import SimulatedAccelerators
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.simulate.rehearsal import Device, rehearse
from meshwise.sync.sync_scheme import sync_scheme
from meshwise.testing import run
from simulate.subjects import gpt_subject
from sync.test_replay import batch, made

SCHEMES = {
    "diloco": ("sync=diloco every=2", {}),
    "streaming": ("sync=diloco every=3", {"fragments": 2, "delay": 1, "blend": 0.25}),
    "elastic": ("sync=easgd every=2", {}),
    "encoded": ("sync=slowmo every=2 wire=int8", {}),
}


def values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in trainer.full_parameters()}


def trained(world: World, scheme: str, offload: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train seven steps; save after the fifth, and train the last two again in a trainer that has loaded it."""
    sync, settings = SCHEMES[scheme]
    plan = f"dp=2 {sync} offload={offload}"
    one = made(world, plan, settings=settings)
    for number in range(5):
        one.step(batch(number))
    one.save(folder)
    for number in (5, 6):
        one.step(batch(number))
    found, memory = values(one), one.memory()
    one.close()
    other = made(world, plan, settings=settings)
    other.load(folder)
    for number in (5, 6):
        other.step(batch(number))
    assert all(torch.equal(value, found[name]) for name, value in values(other).items())
    other.close()
    world.close()
    return found, memory


TIERS: tuple[tuple[str, Literal["late", "early"] | None], ...] = (("cpu", "late"), ("disk", "early"), ("disk", None))
RACING = {"late": "encoded", "early": "streaming"}
"""The schemes that a part has on simulated accelerators: with errors of a codec, with a fragment on its way."""


@pytest.mark.grid(
    Grid(
        {"scheme": tuple(SCHEMES), "on": TIERS},
        heavy=lambda cell: cell["on"][1] is not None and RACING[cell["on"][1]] != cell["scheme"],
    )
)
def test_a_tier_changes_no_bit(scheme: str, on: tuple[str, Literal["late", "early"] | None], tmp_path: Path) -> None:
    tier, timing = on
    where: dict[str, Any] = {} if timing is None else {"on": SimulatedAccelerators(timing=timing)}
    expected = run(2, trained, args=(scheme, "none", tmp_path / "device"))
    found = run(2, trained, args=(scheme, f"outer:{tier}", tmp_path / "tier"), **where)
    for (ours, memory), (theirs, plain) in zip(found, expected, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
        assert memory[f"{tier}/reduction"] + memory.get("reduction", 0) == plain["reduction"]
        assert ("reduction" in memory and memory["reduction"] > 0) == (scheme == "encoded")  # the codec's errors


@pytest.mark.parametrize("device, offload", [("cuda", "outer:cpu"), ("cpu", "outer:disk")])
def test_a_rehearsal_has_the_outer_state_off_the_device(device: Device, offload: str) -> None:
    plan, subject = "dp=2 sync=diloco every=2", gpt_subject()
    trained = sum(parameter.nbytes for parameter in subject.model().parameters())
    here, away = (
        rehearse(subject, plan=each, ranks=2, device=device).tapes[0] for each in (plan, f"{plan} offload={offload}")
    )
    assert dict(away.off_device) == {offload.partition(":")[2]: 2 * trained}
    assert not here.off_device


def test_a_plan_without_replicas_that_differ_is_refused() -> None:
    with pytest.raises(PlanError, match="only replicas that differ keep an outer state"):
        Plan.parse("dp=2 offload=outer:cpu")
    with pytest.raises(ValueError, match="sync=local keeps nothing between agreements; write offload=none"):
        sync_scheme(Plan.parse("dp=2 sync=local offload=outer:cpu"), settings={})
