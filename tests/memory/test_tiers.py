"""On every tier the model is the same to the last bit: after steps, in its checkpoints, and after a load."""

import copy
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Cell, Grid
from memory.offloaded_model import SMALL, Blocks, batches, outcome, squares, the_same, trained, under
from meshwise.base.step_timeline import Timeline, TimelineRow
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import measure
from meshwise.testing import run
from run_on_processes import ON_GPU
from warm_processes import Processes

TIERS = (
    "optimizer:cpu",
    "optimizer:disk",
    "gradients:disk",
    "params:cpu",
    "params:disk",
    "optimizer:disk,gradients:disk,params:disk",
    "masters:disk,optimizer:cpu",
)


@functools.cache
def without_tiers(ranks: int, plan: str, kind: type = torch.optim.AdamW) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run(ranks, functools.partial(trained, plan=plan, kind=kind))[0]
    return found


def exists(cell: Cell) -> bool:
    return cell["zero"] == 3 or "params" not in cell["tiers"]


@pytest.mark.grid(Grid({"tiers": TIERS, "zero": (0, 1, 2, 3), "dp": (1, 2), "microbatches": (1, 2)}, exists=exists))
def test_every_tier_gives_the_bits_of_the_plan_without_it(tiers: str, zero: int, dp: int, microbatches: int) -> None:
    plan = f"dp={dp} zero={zero} microbatches={microbatches}"
    found = run(dp, functools.partial(trained, plan=f"{plan} offload={tiers}"))
    for own in found:
        the_same(own, without_tiers(dp, plan))


OTHERS = Grid(
    {
        "plan": (
            "dp=2 zero=3 precision=bf16",
            "dp=2 zero=1 precision=bf16",
            "tp=2 zero=3",
            "dp=2 pp=2 zero=3 microbatches=2 partition=params",
        ),
        "tiers": ("optimizer:disk", "optimizer:disk,gradients:disk,params:disk"),
    },
    # narrow parameters have masters, whose tiers differ
    heavy=lambda cell: "bf16" not in cell["plan"] and cell["tiers"] == "optimizer:disk",
)


@pytest.mark.grid(OTHERS)
def test_tiers_with_other_ways_of_splitting(plan: str, tiers: str) -> None:
    if "params" in tiers and "zero=3" not in plan:
        tiers = "optimizer:disk,gradients:disk"
    ranks = 4 if "pp" in plan else 2
    for own in run(ranks, functools.partial(trained, plan=f"{plan} offload={tiers}")):
        # After another last bit of a master, a value in bf16 may differ by its own last bit: at most 2**-7 of it.
        the_same(own, without_tiers(ranks, plan), on_gpu=2**-7 if "bf16" in plan else 1e-5)


class Signs(torch.optim.Optimizer):
    """Counts its steps in its groups, as some optimizers do, and keeps state of another dtype."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["average"].lerp_(parameter.grad.double(), 0.1)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["average"].sign().float(), alpha=group["lr"] / group["steps"])


KINDS = {
    torch.optim.SGD: {"momentum": 0.9, "lr": 1e-2},
    torch.optim.Adam: {"amsgrad": True, "lr": 1e-2},
    torch.optim.RMSprop: {"lr": 1e-3, "centered": True},
    torch.optim.Adagrad: {"lr": 1e-2},
    torch.optim.NAdam: {"lr": 1e-2, "foreach": False},
    Signs: {"lr": 1e-2},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_elementwise_optimizer_goes_through_the_tiers(kind: type) -> None:
    def main(world: World, tiers: str) -> dict[str, Tensor]:
        return trained(world, f"dp=2 zero=2 offload={tiers}", kind=kind, **KINDS[kind])

    expected = run(2, main, args=("none",))[0]
    the_same(run(2, main, args=("optimizer:disk,gradients:disk",))[0], expected)


PLACES = ("none", "optimizer:disk", "params:disk,optimizer:disk")


@pytest.mark.grid(Grid({"origin": PLACES, "to": PLACES}, exists=lambda cell: cell["origin"] != cell["to"], strength=1))
def test_a_checkpoint_goes_from_any_tier_to_any_other(origin: str, to: str, tmp_path: Path) -> None:
    def main(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first = under(world, f"dp=2 zero=3 offload={origin}")
        for batch in batches():
            first.step(batch)
        saving = first.save(tmp_path / "saved", wait=False)
        first.step(batches(5)[3])
        first.step(batches(5)[4])
        expected = outcome(first)
        saving.wait()
        second = under(world, f"dp=2 zero=3 offload={to}")
        second.load(tmp_path / "saved")
        second.step(batches(5)[3])
        second.step(batches(5)[4])
        found = outcome(second)
        first.close()
        second.close()
        return found, expected

    for found, expected in run(2, main):
        the_same(found, expected)


@pytest.mark.processes
def test_processes_with_everything_on_disk_give_the_same_bits(processes: Processes) -> None:
    plan = "dp=2 zero=3"
    everything = f"{plan} offload=optimizer:disk,gradients:disk,params:disk"
    on_cpu = ON_GPU in os.environ  # these processes compute there, also where other tests use a GPU
    expected = run(2, trained, on=processes, args=(plan,))[0] if on_cpu else without_tiers(2, plan)
    for own in run(2, trained, on=processes, args=(everything,)):
        the_same(own, expected)


def test_a_measured_step_shows_the_next_round_read_while_one_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads take a while, and an update goes on until one that is under way has ended."""
    read, ends = os.preadv, list[int]()
    waits = threading.Event()

    def slowly(*given: Any) -> int:
        time.sleep(0.02)
        ends.append(read(*given))
        return ends[-1]

    class Patient(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            before, until = len(ends), time.monotonic() + 0.5  # there is none beside the last
            while waits.is_set() and len(ends) == before and time.monotonic() < until:
                time.sleep(0.001)
            return super().step(closure)

    def main(world: World) -> Timeline:
        trainer = under(world, "zero=3 offload=optimizer:disk,params:disk", kind=Patient)
        trainer.step(batches()[0])
        monkeypatch.setattr(os, "preadv", slowly)
        waits.set()
        with measure(trainer) as measuring:
            trainer.step(batches()[1])
        trainer.close()
        [step] = measuring.steps()
        return step.step

    events = [event for event in run(1, main)[0].events if event.row is TimelineRow.TIERS]
    updates = [event for event in events if event.kind == "update"]
    assert len(updates) > 3
    reads = [event for event in events if event.kind == "read"]
    # What a round needs has come before its update starts, so a read that goes on beside one is of a later round.
    assert any(read.start < update.stop and update.start < read.stop for read in reads for update in updates)
    assert {event.kind for event in events} == {"read", "update", "write"}


def test_frozen_parameters_are_offloaded_and_evaluated_too() -> None:
    frozen = Blocks()
    frozen.blocks[0].requires_grad_(requires_grad=False)

    def main(world: World, plan: str) -> dict[str, Tensor]:
        model = copy.deepcopy(frozen)
        options = Options(clip_norm=0.5, swap=SMALL)
        trainer = parallelize(model, plan, loss=squares, world=world, options=options, lr=1e-2)
        first, second, third = batches()
        trainer.step(first)
        evaluated = trainer.evaluate([second]).loss
        predicted = trainer.predict(third)
        trainer.step(second)
        found = {**outcome(trainer), "evaluated": torch.tensor(evaluated), "predicted": predicted}
        trainer.close()
        return found

    offloaded = run(2, main, args=("dp=2 zero=3 offload=params:disk,optimizer:disk",))
    plain = run(2, main, args=("dp=2 zero=3",))
    for found, expected in zip(offloaded, plain, strict=True):
        the_same(found, expected)


def test_the_initial_state_of_an_optimizer_is_moved_to_its_tier(tmp_path: Path) -> None:
    def main(world: World, plan: str) -> dict[str, Tensor]:
        begins: dict[str, Any] = {"initial_accumulator_value": 0.1, "weight_decay": 0.0}
        trainer = under(world, plan, kind=torch.optim.Adagrad, **begins)
        trainer.step(batches()[0])
        trainer.save(tmp_path / "saved")
        trainer.step(batches()[1])
        trainer.load(tmp_path / "saved")
        trainer.step(batches()[1])
        found = outcome(trainer)
        trainer.close()
        return found

    expected = run(2, main, args=("dp=2 zero=1",))[0]
    for tiers in ("optimizer:cpu", "optimizer:disk", "optimizer:disk,gradients:disk"):
        the_same(run(2, main, args=(f"dp=2 zero=1 offload={tiers}",))[0], expected)
