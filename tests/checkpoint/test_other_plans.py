"""Save under one plan, load under another: the full state is the same, bit for bit, and so is the next step.

The full state is what the reader of docs/checkpoints.md gets out of the folder, which knows nothing of meshwise; the
parameters are compared with those that the trainers themselves gather."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from checkpoint.cases import Case, Then, gathered, ranks, same_tensors, save, there_and_back
from checkpoint.reader import read
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.testing import run
from warm_processes import Processes

PLANS = (
    "dp=1",
    "dp=3 zero=0",
    "dp=2 zero=1",
    "dp=4 zero=1",
    "dp=3 zero=2",
    "dp=4 zero=2 microbatches=2",
    "dp=2 zero=3",
    "dp=3 zero=3",
)


NARROW = Case(dtype=torch.bfloat16)
GRAPHIC = Case(heads=4)


Saved: TypeAlias = Callable[[Case, str], dict[Path, Then]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return what saves a case under a plan, once, and returns the folder with what was saved."""
    root = tmp_path_factory.mktemp("saved")

    @functools.cache
    def under(case: Case, plan: str) -> dict[Path, Then]:
        folder = root / f"{case.heads}-{plan}".replace(" ", "-")
        return {folder: run(ranks(plan), save, args=(case, plan, folder))[0]}

    return under


@pytest.mark.grid(Grid({"before": PLANS, "plan": PLANS}, strength=1))
def test_a_state_saved_under_any_plan_is_the_same_under_this_one(
    before: str, plan: str, saved: Saved, tmp_path: Path
) -> None:
    there_and_back(Case(), plan, saved(Case(), before), tmp_path)


@pytest.mark.parametrize("plan", PLANS)
def test_the_parameters_in_the_files_are_those_of_the_model(plan: str, saved: Saved) -> None:
    for folder, (parameters, _) in saved(Case(), plan).items():
        state = read(folder)
        same_tensors({name: state[f"parameter/{name}"] for name in parameters}, parameters)


OTHERS = {
    "bf16 with fp32 masters": NARROW,
    "sgd with momentum": Case(optimizer=torch.optim.SGD, options=(("lr", 1e-2), ("momentum", 0.9))),
    "sgd without state": Case(optimizer=torch.optim.SGD, options=(("lr", 1e-2),)),
    "nadam, whose state has two numbers": Case(optimizer=torch.optim.NAdam),
    "adagrad": Case(optimizer=torch.optim.Adagrad),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_optimizers_and_dtypes_load_under_other_plans(case: Case, tmp_path: Path) -> None:
    for first, second in itertools.pairwise(["dp=2 zero=0", "dp=3 zero=3", "dp=1", "dp=2 zero=2"]):
        folder = tmp_path / "saved" / first
        there_and_back(
            case, second, {folder: run(ranks(first), save, args=(case, first, folder))[0]}, tmp_path / second
        )


TENSOR_PLANS = (
    "dp=1",
    "dp=3 zero=3",
    "tp=4 sequence_parallel=1",
    "dp=2 tp=2 zero=1",
    "dp=2 tp=2 zero=3",
    "tp=4 tp_mode=2d",
    "dp=2 tp=4 tp_mode=2d zero=2",
    "tp=8 tp_mode=3d",
    "pp=2 microbatches=2 partition=params",
    "pp=2 dp=2 zero=3 microbatches=2 schedule=zb-h1 partition=params",
    "pp=2 tp=2 zero=1 microbatches=2 partition=params",
)


LARGE = (
    "dp=2 tp=4 tp_mode=2d zero=2",
    "tp=8 tp_mode=3d",
    "pp=2 tp=2 zero=1 microbatches=2 partition=params",
)
"""What they combine has plans of its own, and 2d splits each matrix in two dims as 3d does."""

TENSORS = Grid(
    {"before": TENSOR_PLANS, "plan": TENSOR_PLANS},
    heavy=lambda cell: cell["before"] in LARGE or cell["plan"] in LARGE,
    strength=1,
)


@pytest.mark.grid(TENSORS)
def test_tensors_that_a_plan_splits_are_whole_in_a_checkpoint(
    before: str, plan: str, saved: Saved, tmp_path: Path
) -> None:
    there_and_back(GRAPHIC, plan, saved(GRAPHIC, before), tmp_path)


@pytest.mark.processes
def test_processes_save_and_load_as_threads_do(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = run(4, save, on=processes, args=(Case(), "dp=4 zero=2", folder))[0]
    there_and_back(Case(), "dp=3 zero=3", {folder: saved}, tmp_path / "threads")
    there_and_back(Case(), "dp=4 zero=1", {folder: saved}, tmp_path / "processes", on=processes)


def test_a_checkpoint_has_everything_that_a_step_depends_on(tmp_path: Path) -> None:
    run(2, save, args=(Case(), "dp=2 zero=2", tmp_path / "one"))
    state = read(tmp_path / "one")
    trained = ["first.weight", "first.bias", "again.weight", "again.bias", "spread.weight", "spread.bias", "gain"]
    assert {f"parameter/{name}" for name in [*trained, "frozen.weight", "frozen.bias"]} <= state.keys()
    for name in trained:
        assert {f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}", f"scalar/step/{name}"} <= state.keys()
        assert state[f"scalar/step/{name}"].item() == 1
    assert state["buffer/seen"].tolist() == [1, 1, 1]
    assert "buffer/scratch" not in state
    assert not [key for key in state if key.endswith("tied.weight")]
    assert {"rank/0/random", "rank/1/random"} <= state.keys()


def masters(world: World, folder: Path) -> dict[str, Tensor]:
    trainer = NARROW.trainer(world, "dp=2 zero=1")
    trainer.step(NARROW.batches()[0])
    trainer.save(folder)
    return gathered(trainer)


def test_the_fp32_master_of_a_bf16_parameter_is_saved(tmp_path: Path) -> None:
    used = run(2, masters, args=(tmp_path / "one",))[0]
    state = read(tmp_path / "one")
    assert state["parameter/first.weight"].dtype == torch.float32
    assert torch.equal(state["parameter/first.weight"].bfloat16(), used["first.weight"])
    assert not torch.equal(state["parameter/first.weight"], used["first.weight"].float())
    assert state["parameter/frozen.weight"].dtype == torch.bfloat16
