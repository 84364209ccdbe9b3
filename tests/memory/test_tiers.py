"""Wherever state rests, the model is the same to the last bit: after steps, in its checkpoints, and after a load."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Cell, Grid
from meshwise.comm import World, run_threads
from meshwise.memory.staging import Swap
from meshwise.parallelize import Options, parallelize
from meshwise.testing import Processes, run
from meshwise.trainer import Trainer

STEPS, WIDTH = 3, 128
TIERS = (
    "optimizer:cpu",
    "optimizer:disk",
    "gradients:disk",
    "params:cpu",
    "params:disk",
    "optimizer:disk,gradients:disk,params:disk",
    "masters:disk,optimizer:cpu",
)
SMALL = Swap(buffers=2, buffer=1 << 16)
"""Staging buffers that hold a part of a layer, so that every update takes rounds."""


class Blocks(nn.Module):
    """Blocks of which one has more elements than are updated at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        result: Tensor = self.head(self.norm(x))
        return result


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def batches(count: int = STEPS) -> list[Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(0)))


def under(world: World, plan: str, *, kind: type = torch.optim.AdamW, swap: Swap = SMALL, **arguments: Any) -> Trainer:
    options = Options(clip_norm=0.5, swap=swap, example=batches()[0])
    arguments = {"lr": 1e-2, "weight_decay": 0.1} | arguments
    return parallelize(Blocks, plan, loss=squares, world=world, optimizer=kind, options=options, **arguments)


def outcome(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in trainer.full_parameters()}
    return found | {f"gradient of {name}": value.clone() for name, value in trainer.full_gradients()}


def trained(world: World, plan: str, **arguments: Any) -> dict[str, Tensor]:
    trainer = under(world, plan, **arguments)
    results = [trainer.step(batch) for batch in batches()]
    numbers = {f"loss and norm {n}": torch.tensor([r.loss, r.grad_norm]) for n, r in enumerate(results)}
    found = outcome(trainer) | numbers
    trainer.close()
    return found


@functools.cache
def without_tiers(ranks: int, plan: str, kind: type = torch.optim.AdamW) -> dict[str, Tensor]:
    return run_threads(ranks, functools.partial(trained, plan=plan, kind=kind))[0]


def the_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


def exists(cell: Cell) -> bool:
    return cell["zero"] == 3 or "params" not in cell["tiers"]


@pytest.mark.grid(Grid({"tiers": TIERS, "zero": (0, 1, 2, 3), "dp": (1, 2), "microbatches": (1, 2)}, exists=exists))
def test_every_tier_gives_the_bits_of_the_plan_without_it(tiers: str, zero: int, dp: int, microbatches: int) -> None:
    plan = f"dp={dp} zero={zero} microbatches={microbatches}"
    found = run_threads(dp, functools.partial(trained, plan=f"{plan} offload={tiers}"))
    for own in found:
        the_same(own, without_tiers(dp, plan))


@pytest.mark.parametrize("tiers", ["optimizer:disk", "optimizer:disk,gradients:disk,params:disk"])
@pytest.mark.parametrize(
    "plan",
    ["dp=2 zero=3 precision=bf16", "dp=2 zero=1 precision=bf16", "tp=2 zero=3", "dp=2 pp=2 zero=3 microbatches=2"],
)
def test_tiers_with_other_ways_of_splitting(plan: str, tiers: str) -> None:
    if "params" in tiers and "zero=3" not in plan:
        tiers = "optimizer:disk,gradients:disk"
    ranks = 4 if "pp" in plan else 2
    for own in run_threads(ranks, functools.partial(trained, plan=f"{plan} offload={tiers}")):
        the_same(own, without_tiers(ranks, plan))


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

    expected = run_threads(2, main, args=("none",))[0]
    the_same(run_threads(2, main, args=("optimizer:disk,gradients:disk",))[0], expected)


@pytest.mark.parametrize("to", ["none", "optimizer:disk", "params:disk,optimizer:disk"])
@pytest.mark.parametrize("origin", ["none", "optimizer:disk", "params:disk,optimizer:disk"])
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

    for found, expected in run_threads(2, main):
        the_same(found, expected)


@pytest.mark.processes
def test_processes_with_everything_on_disk_give_the_same_bits(processes: Processes) -> None:
    plan = "dp=2 zero=3"
    everything = f"{plan} offload=optimizer:disk,gradients:disk,params:disk"
    for own in run(2, trained, on=processes, args=(everything,)):
        the_same(own, without_tiers(2, plan))
