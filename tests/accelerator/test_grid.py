"""Test that plans train on simulated accelerators as on one process, with work of streams late, early and by chance.

Two steps of AdamW with clipping, in float64: loss, norm, every gradient and every parameter to 1e-9, on every rank.
A race between streams, memory that is freed too early, and ranks that wait for each other are errors.
"""

import zlib
from typing import Literal

import pytest

from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.training import check
from grid import Cell, Grid
from meshwise.plan import Plan, PlanError

WHOLE = {"dp": "dp=2", "tp": "tp=2", "cp": "cp=2 context=ring", "window": "cp=2 context=window"}
STAGED = {
    "naive": "pp=2 schedule=naive",
    "gpipe": "pp=2 schedule=gpipe",
    "1f1b": "pp=2 schedule=1f1b",
    "interleaved": "pp=2 schedule=interleaved virtual_stages=2",
    "looped": "pp=2 schedule=looped virtual_stages=2",
    "zb-h1": "pp=2 schedule=zb-h1",
    "zb-h2": "pp=2 schedule=zb-h2",
    "zb-v": "pp=2 schedule=zb-v virtual_stages=2",
    "dualpipev": "pp=2 schedule=dualpipev virtual_stages=2",
}
TIERS = ("none", "params:cpu,optimizer:cpu", "optimizer:disk", "activations:cpu", "activations:disk")


def plan_of(cell: Cell) -> str:
    split = {**WHOLE, **STAGED}[cell["split"]]
    both = " dp=2" if cell["zero"] and "dp" not in split else ""
    return f"{split}{both} zero={cell['zero']} microbatches=4 recompute={cell['recompute']} offload={cell['offload']}"


def exists(cell: Cell) -> bool:
    try:
        Plan.parse(plan_of(cell))
    except PlanError:
        return False
    return True


def is_cheap(cell: Cell) -> bool:
    """Of the schedules, a plain one and one with two stages on each rank; tiers and ZeRO on replicas alone."""
    alone = cell["offload"] == "none" and not cell["zero"]
    return cell["split"] == "dp" or (
        cell["split"] in ("tp", "cp", "1f1b", "zb-v") and alone and cell["recompute"] == "none"
    )


class CheapValues(Grid):
    """Grid of which `make test` runs cells that have every value of its cheap cells."""

    def part(self) -> list[Cell]:
        return Grid(self.axes, exists=lambda cell: self.exists(cell) and is_cheap(cell), strength=1).part()


GRID = CheapValues(
    {
        "split": (*WHOLE, *STAGED),
        "zero": (0, 1, 2, 3),
        "offload": TIERS,
        "recompute": ("none", "selective", "full"),
    },
    exists=exists,
)
TIMINGS: tuple[Literal["late", "early"], ...] = ("late", "early")


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process(
    split: str, zero: int, offload: str, recompute: str, pytestconfig: pytest.Config
) -> None:
    plan = plan_of({"split": split, "zero": zero, "offload": offload, "recompute": recompute})
    timings = TIMINGS if pytestconfig.getoption("--whole-grids") else (TIMINGS[zlib.crc32(plan.encode()) % 2],)
    for timing in timings:
        check(plan, on=SimulatedAccelerators(timing=timing))


@pytest.mark.parametrize("seed", range(2))
def test_chances_change_no_number(seed: int) -> None:
    check("dp=2 zero=3 offload=params:cpu,activations:cpu", on=SimulatedAccelerators(timing="random", seed=seed))
