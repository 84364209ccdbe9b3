"""Test that plans train on simulated accelerators as on one process, with work of streams late, early and by chance.

Two steps of AdamW with clipping, in float64: loss, norm, every gradient and every parameter to 1e-9, on every rank.
A race between streams, memory that is freed too early, and ranks that wait for each other are errors."""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from accelerator.random_delays import random_delays
from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.training import check, check_losses, losses
from grid import Cell, Grid, is_plan
from meshwise.plan import Plan
from meshwise.testing import agree, run

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
TIERS = (
    "none",
    "params:cpu,optimizer:cpu",
    "params:disk",
    "optimizer:disk",
    "activations:cpu",
    "activations:disk",
)


def plan_of(cell: Cell) -> str:
    split = {**WHOLE, **STAGED}[cell["split"]]
    both = " dp=2" if cell["zero"] and "dp" not in split else ""
    rest = " ".join(f"{key}={cell[key]}" for key in ("zero", "recompute", "offload", "precision"))
    microbatches = 4 if cell["split"] in STAGED else 3  # a first one, one between, and a last one
    return f"{split}{both} microbatches={microbatches} {rest}"


def exists(cell: Cell) -> bool:
    return is_plan(plan_of(cell))


def is_cheap(cell: Cell) -> bool:
    """Of the schedules, a plain one and one with two stages on each rank; tiers and ZeRO on replicas alone. `SPLITS`
    has tensors and tokens that are split."""
    if cell["precision"] != "fp32":
        others = (3, "none", "none") if cell["precision"] == "fp16" else (1, "none", "none")
        return (cell["split"], cell["zero"], cell["offload"], cell["recompute"]) == ("dp", *others)
    staged = (cell["split"], cell["zero"]) in (("1f1b", 1), ("zb-v", 0))
    if cell["offload"] == "activations:cpu":
        return False  # of the test of chances
    return cell["split"] == "dp" or (staged and cell["offload"] == "none" and cell["recompute"] == "none")


IN_STAGES = (("zb-h1", 3, "none"),)
"""Schedules, zero and recompute of further cells of `make test`, so that each zero with a schedule is there: `SPLITS`
has zero=2."""


_ORDER = ("split", "zero", "recompute", "offload", "precision")


class CheapValues(Grid):
    """Grid of which `make test` runs cells that have every value of its cheap cells, and the cells of `IN_STAGES`."""

    def part(self) -> list[Cell]:
        cheap = Grid(self.axes, exists=lambda cell: is_cheap(cell) and self.exists(cell), strength=1).part()
        more = [(*staged, "none", "fp32") for staged in IN_STAGES]
        staged = Grid(self.axes, exists=lambda cell: tuple(map(cell.get, _ORDER)) in more and self.exists(cell))
        return cheap + [cell for cell in staged.whole() if cell not in cheap]


GRID = CheapValues(
    {
        "split": (*WHOLE, *STAGED),
        "zero": (0, 1, 2, 3),
        "offload": TIERS,
        "recompute": ("none", "selective", "full"),
        "precision": ("fp32",),
    },
    exists=exists,
)
NARROW = CheapValues(
    {
        "split": (*WHOLE, "1f1b", "zb-v"),
        "zero": (0, 1, 2, 3),
        "offload": ("none", "activations:cpu", "params:cpu,optimizer:cpu"),
        "recompute": ("none", "selective", "full"),
        "precision": ("bf16", "fp16"),
    },
    exists=exists,
)
TIMINGS: tuple[Literal["late", "early"], ...] = ("late", "early")


def devices(plan: str, config: pytest.Config) -> Sequence[SimulatedAccelerators]:
    """Return accelerators of both timings and, for plans without tiers, of a host that waits at each launch. If not the
    whole grid runs, return one of them, chosen by the plan's text."""
    found = [SimulatedAccelerators(timing=timing) for timing in TIMINGS]
    if "offload=" not in plan or "offload=none" in plan:
        found.append(SimulatedAccelerators(waits_at_launch=True))
    return found if config.getoption("--whole-grids") else [found[zlib.crc32(plan.encode()) % len(found)]]


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process(
    split: str, zero: int, offload: str, recompute: str, precision: str, pytestconfig: pytest.Config
) -> None:
    plan = plan_of({"split": split, "zero": zero, "offload": offload, "recompute": recompute, "precision": precision})
    for on in devices(plan, pytestconfig):
        check(plan, on=on)


@pytest.mark.grid(NARROW)
def test_a_plan_in_a_narrow_dtype_is_that_of_the_cpu(
    split: str, zero: int, offload: str, recompute: str, precision: str, pytestconfig: pytest.Config
) -> None:
    plan = plan_of({"split": split, "zero": zero, "offload": offload, "recompute": recompute, "precision": precision})
    for on in devices(plan, pytestconfig):
        check(plan, on=on)


NEXT = ("dp=2 zero=1", "dp=2 pp=2 microbatches=2 zero=2 offload=optimizer:cpu")


@pytest.mark.grid(Grid({"plan": NEXT, "timing": TIMINGS}, strength=1))
def test_parameters_that_arrive_in_the_next_forward(plan: str, timing: Literal["late", "early"]) -> None:
    check_losses(f"{plan} overlap_gather=1", on=SimulatedAccelerators(timing=timing))


def test_experts_of_one_rank_are_there_at_once_and_others_arrive() -> None:
    check("dp=4 ep=2 zero=2 overlap_gather=1", on=SimulatedAccelerators(timing="late"))


WAITING = Grid(
    {"schedule": tuple(STAGED), "ranks": (2, 4)},
    heavy=lambda cell: (cell["ranks"] == 4) != (cell["schedule"] == "looped"),
)


@pytest.mark.grid(WAITING)
def test_no_rank_waits_for_ever_where_the_host_waits_at_each_launch(schedule: str, ranks: int) -> None:
    plan = STAGED[schedule].replace("pp=2", f"pp={ranks}")
    check_losses(f"{plan} microbatches={2 * ranks}", on=SimulatedAccelerators(waits_at_launch=True), steps=2)


SETTINGS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("gossip", {}),
    ("gossip", {"graph": "exponential"}),
    ("gossip", {"graph": "torus"}),
    ("local", {"group": 2}),
    ("slowmo", {}),
    ("diloco", {"fragments": 2, "delay": 1}),
    ("diloco wire=int8", {"fragments": 2, "delay": 1}),
)


APART: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("gossip", {"graph": "torus"}),
    ("local", {"group": 2}),
    ("diloco wire=int8", {"fragments": 2, "delay": 1}),
)
"""Those whose messages are no part of another's."""


@pytest.mark.grid(Grid({"setting": SETTINGS}, heavy=lambda cell: cell["setting"] not in APART))
def test_replicas_that_agree_across_steps_are_those_of_the_cpu(setting: tuple[str, Mapping[str, Any]]) -> None:
    sync, settings = setting
    plan = Plan.parse(f"dp=4 sync={sync} every=2")
    main, on = functools.partial(losses, sync=settings), SimulatedAccelerators(waits_at_launch=True)
    agree(run(4, main, on=on, args=(plan,)), run(4, main, args=(plan,)), bound=1e-9)


# ---- schedules with every split inside a stage -------------------------------------------------------------------

INNER = (
    "tp=2",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d",
    *(f"cp=2 context={name}" for name in ("ring", "zigzag", "striped", "window", "ulysses", "gather")),
    "cp=4 context=usp cp_heads=2",
    "tp=2 cp=2 context=ring",
    "dp=2 ep=2",
    "dp=2 ep=2 tp=2",
)


def split_plan(cell: Cell) -> str:
    microbatches = 4 if cell["schedule"] in ("zb-v", "dualpipev") else 2
    staged = f"{STAGED[cell['schedule']]} microbatches={microbatches}" if cell["schedule"] else ""
    both = " dp=2" if cell["zero"] and "dp" not in cell["inner"] else ""
    return f"{cell['inner']}{both} zero={cell['zero']} {staged}"


def split_exists(cell: Cell) -> bool:
    return is_plan(split_plan(cell))


class CheapSplits(Grid):
    """Grid of which `make test` runs one cell without stages, and three with a split inside of stages; experts with
    zero=2, the others without."""

    def part(self) -> list[Cell]:
        cheap = {"": ("cp=2 context=ulysses",), "gpipe": ("tp=2", "cp=2 context=ring"), "1f1b": ("dp=2 ep=2",)}
        chosen = [cell for cell in self.whole() if cell["inner"] in cheap.get(cell["schedule"], ())]
        return [cell for cell in chosen if cell["zero"] == (2 if "ep" in cell["inner"] else 0)]


SPLITS = CheapSplits({"schedule": ("", *STAGED), "inner": INNER, "zero": (0, 1, 2, 3)}, exists=split_exists)


@pytest.mark.grid(SPLITS)
def test_stages_that_are_split_are_one_process(
    schedule: str, inner: str, zero: int, pytestconfig: pytest.Config
) -> None:
    plan = split_plan({"schedule": schedule, "inner": inner, "zero": zero})
    for on in devices(plan, pytestconfig):
        check(plan, on=on)


def test_the_part_has_each_schedule_and_each_split_and_zero_inside_of_stages() -> None:
    staged = [cell for cell in GRID.part() if cell["split"] in STAGED]
    split = [cell for cell in SPLITS.part() if cell["schedule"]]
    assert {cell["schedule"] for cell in WAITING.part()} == STAGED.keys()
    assert {cell["zero"] for cell in (*staged, *split)} == {0, 1, 2, 3}
    assert {name for cell in split for name in ("tp", "cp", "ep") if f"{name}=2" in cell["inner"]} == {"tp", "cp", "ep"}


# ---- chances -----------------------------------------------------------------------------------------------------


class WholeOnly(Grid):
    """Grid of which `make test` runs one cell."""

    def part(self) -> list[Cell]:
        return self.whole()[:1]


@pytest.mark.grid(WholeOnly({"seed": range(2)}))
def test_chances_change_no_number(seed: int) -> None:
    check("dp=2 zero=3 offload=params:cpu,activations:cpu", on=SimulatedAccelerators(timing="random", seed=seed))


@pytest.mark.grid(WholeOnly({"schedule": tuple(STAGED), "seed": (0, 1)}))
def test_no_delay_lets_ranks_wait_for_each_other(schedule: str, seed: int, pytestconfig: pytest.Config) -> None:
    random_delays(STAGED[schedule], steps=500 if pytestconfig.getoption("--whole-grids") else 5, seed=seed)
