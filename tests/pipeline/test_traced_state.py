"""A stage of a trace holds what a stage of pieces would: parameters and buffers under the model's names, and ties.

fx knows only what operations read, calls every tensor that they read a buffer, and names what is tied as it likes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint.cases import same_state
from checkpoint.reader import read
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError
from meshwise.testing import run
from pipeline.training import WIDTH, made, numbers, squares, trains_like_one

TRACE = CutOptions(how="trace")


class Holding(nn.Module):
    """State of every kind: read by an operation, inside of a module that is called, by nothing."""

    read: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.ModuleList([nn.Linear(2, 3)])
        self.idle = nn.Parameter(torch.ones(3))
        self.plain = torch.full((WIDTH,), 0.5, dtype=torch.float64)
        for name, persistent in (("read", True), ("left", True), ("passing", False)):
            self.register_buffer(name, torch.arange(float(WIDTH)), persistent=persistent)
        self.unused.register_buffer("deep", torch.ones(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x)) * self.plain + self.read + self.passing + torch.arange(x.shape[-1])
        return self.last(self.norm(self.second(x)))


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("plan", ["pp=2", "pp=2 dp=2 zero=3", "pp=2 schedule=looped virtual_stages=2"])
def test_all_state_is_in_a_checkpoint_and_comes_back(plan: str, function: bool, tmp_path: Path) -> None:
    def main(world: World, plan: str, source: Path | None, target: Path) -> list[str]:
        options = Options(cut=TRACE, example=numbers(8)[0])
        model: Any = (lambda: Holding().double()) if function else made(Holding)
        trainer = parallelize(model, plan, loss=squares, world=world, options=options, lr=1e-2)
        if source is None:
            trainer.step(numbers(8)[0])
        else:
            trainer.load(source)
        trainer.save(target)
        return [name for name, _ in trainer.full_parameters()]

    plan = f"{plan} partition=params microbatches={2 if 'virtual' in plan else 1}"
    whole, split, back = tmp_path / "whole", tmp_path / "split", tmp_path / "back"
    names = run(1, main, args=("dp=1", None, whole))[0]
    ranks = 4 if "dp=2" in plan else 2
    assert sorted(run(ranks, main, args=(plan, whole, split))[0]) == sorted(names)
    assert {"buffer/read", "buffer/left", "buffer/unused.deep", "buffer/norm.running_mean"} <= read(split).keys()
    assert not {"buffer/plain", "buffer/passing"} & read(split).keys()
    run(1, main, args=("dp=1", split, back))
    for other in (split, back):
        same_state(read(other), read(whole))


class Tied(nn.Module):
    """The last stage has a weight under another name than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("plan", ["pp=2", "pp=3 microbatches=2", "pp=2 dp=2 zero=3 microbatches=2 schedule=zb-h1"])
def test_what_is_tied_stays_one(plan: str) -> None:
    trains_like_one(made(Tied), plan, numbers(6, 5, 4), where=TRACE)


class Twice(nn.Module):
    """Runs a layer twice, the second time on another stage."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
        self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.layer(self.other(torch.tanh(self.layer(x))))))


@pytest.mark.parametrize(
    "inner, words",
    [
        (lambda: nn.Dropout(0.3), "draws random numbers and is called more than once, and a trace cannot tell"),
        (lambda: nn.BatchNorm1d(WIDTH), "needs a side effect of .*"),
    ],
)
def test_calls_of_one_module_that_a_trace_cannot_tell_apart_are_refused(inner: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        trains_like_one(made(lambda: Twice(inner())), "pp=2", numbers(6), where=TRACE)


@pytest.mark.parametrize("inner", [lambda: nn.Dropout(0.0), nn.Tanh, lambda: nn.LayerNorm(WIDTH)])
def test_others_run_twice(inner: Any) -> None:
    trains_like_one(made(lambda: Twice(inner())), "pp=2 microbatches=2", numbers(6, 5), where=TRACE)


class Averaging(nn.Module):
    """An operation of the trace changes a buffer that another one reads: before it, or after."""

    mean: Tensor

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self._first = first

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self._first:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.second(torch.tanh(x)) * self.mean
        x = self.second(torch.tanh(x + self.mean))
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_buffer_that_one_stage_would_change_and_another_read_is_refused(first: bool, function: bool) -> None:
    def main(world: World) -> None:
        options = Options(cut=CutOptions(how="trace", at=("second",)), example=numbers(8)[0])
        model: Any = (lambda: Averaging(first=first).double()) if function else Averaging(first=first).double()
        parallelize(model, "pp=2", loss=squares, world=world, options=options, lr=1e-2)

    with pytest.raises(PlanError, match=r"needs a side effect of .*"):
        run(2, main)


@pytest.mark.parametrize("first", [False, True])
def test_a_buffer_that_is_changed_and_read_on_one_stage_stays_right(first: bool) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Averaging(first=first))

    where = CutOptions(how="trace", at=("_2_first",))
    trains_like_one(made(model), "pp=2", numbers(6, 5, 4), where=where)
