"""Test the average of the parameters: its numbers are those of a loop in plain torch, saved and loaded anywhere."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from grid import Grid
from meshwise.checkpoint.hugging_face import export
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, build_whole, run

DECAY, STEPS = 0.7, 4


def build() -> nn.Module:
    shape = GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, mlp_ratio=2, tied=True)
    model = GPT(shape).double()
    model.norm.weight.requires_grad = False
    return model


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16, (6, 5), generator=torch.Generator().manual_seed(number))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def made(world: World, plan: str, **settings: Any) -> Trainer:
    options = Options(example=batch(0), parameter_options=lambda _name, _parameter: {})
    return parallelize(build, plan, world=world, loss=next_token_loss, options=options, lr=1e-2, **settings)


@functools.cache
def plain(initial: bool = True) -> dict[str, Any]:
    """Return the averaged parameters and their loss, and the parameters, after the steps in plain torch.

    initial: the average begins with the initial parameters, as in timm; torch's begins after the first update."""
    model = build_whole(build, seed=0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.n_averaged.fill_(int(initial))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for number in range(STEPS):
        inputs, _ = batch(number)
        optimizer.zero_grad()
        total, count = next_token_loss(model(inputs), batch(number))
        (total / count).backward()
        optimizer.step()
        average.update_parameters(model)
    total, count = next_token_loss(average(batch(99)[0]), batch(99))
    return {
        "loss": float(total.detach()) / float(count),
        "average": {name: value.detach() for name, value in average.module.named_parameters()},
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
    }


def figures(trainer: Trainer, average: Any) -> dict[str, Any]:
    with average.applied():
        loss = trainer.evaluate([batch(99)]).loss
        averaged = {name: value.clone() for name, value in trainer.full_parameters()}
    return {"loss": loss, "average": averaged, "parameters": {n: v.clone() for n, v in trainer.full_parameters()}}


SPLITS = ("dp=1", "dp=3", "dp=2 tp=2", "pp=2 microbatches=2")
OTHERS = ("dp=2 zero=3", "pp=2 microbatches=2", "dp=3")
PLANS = Grid({"split": SPLITS, "zero": (0, 1, 3), "other": OTHERS}, strength=1)


@pytest.mark.grid(PLANS)
def test_the_average_is_that_of_one_process_and_continues_under_another_plan(
    split: str, zero: int, other: str, tmp_path: Path
) -> None:
    plan = f"{split} zero={zero}"

    def first(world: World) -> Any:
        trainer = made(world, plan)
        average = trainer.average(DECAY)
        for number in range(2):
            trainer.step(batch(number))
        trainer.save(tmp_path / "step-2")
        for number in range(2, STEPS):
            trainer.step(batch(number))
        return figures(trainer, average)

    def resumed(world: World) -> Any:
        trainer = made(world, other)
        average = trainer.average(DECAY)
        trainer.load(tmp_path / "step-2")
        for number in range(2, STEPS):
            trainer.step(batch(number))
        return figures(trainer, average)

    for found in [*run(Plan.parse(plan).mesh().size, first), *run(Plan.parse(other).mesh().size, resumed)]:
        agree(found, plain(), bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
def test_an_average_made_after_the_first_step_is_torchs(plan: str) -> None:
    def main(world: World) -> Any:
        trainer = made(world, plan)
        trainer.step(batch(0))
        average = trainer.average(DECAY)
        for number in range(1, STEPS):
            trainer.step(batch(number))
        return figures(trainer, average)

    for found in run(2, main):
        agree(found, plain(initial=False), bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=1", "dp=2 zero=3"])
def test_a_target_network_is_an_average_that_is_used_from_the_first_step_on(plan: str) -> None:
    """As in BYOL: the target of each step is the output of the averaged model."""
    mlp = functools.partial(build_whole, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    inputs = [torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]

    def main(world: World) -> list[float]:
        trainer = parallelize(mlp(seed=0), plan, world=world, optimizer=torch.optim.SGD, lr=0.5)
        average, losses = trainer.average(DECAY), []
        for x in inputs:
            with trainer.open_step() as step:
                rows = step.rows(x)
                with average.applied():
                    target = trainer.predict(rows + 0.1)
                loss = (step.forward(rows) - target).square()
                step.backward(step.mean(loss.sum(), loss.numel()))
                losses.append(step.update().loss)
        return losses

    online, target = mlp(seed=0), mlp(seed=0)
    optimizer, losses = torch.optim.SGD(online.parameters(), lr=0.5), []
    for x in inputs:
        loss = (online(x) - target(x + 0.1).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 1 - DECAY)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, losses, bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1", "dp=2 zero=3"])
def test_an_average_of_bf16_parameters_is_kept_in_fp32(plan: str) -> None:
    def main(world: World) -> Any:
        trainer = parallelize(lambda: nn.Linear(4, 4).bfloat16(), plan, world=world, loss=_sum, lr=0.1)
        average = trainer.average(0.999)
        for _ in range(3):
            trainer.step(torch.ones(2, 4, dtype=torch.bfloat16))
        state = [held["average"] for held in trainer.optimizer.state.values()]
        before = {name: value.clone() for name, value in trainer.full_parameters()}
        with average.applied():
            inside = {name: value.clone() for name, value in trainer.full_parameters()}
        agree({n: v.clone() for n, v in trainer.full_parameters()}, before, bound=0.0)
        assert all(value.dtype == torch.float32 for value in state)
        assert any(not torch.equal(inside[name], before[name]) for name in before)

    run(2, main)


def _sum(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def test_the_average_is_exported(tmp_path: Path) -> None:
    def main(world: World) -> Any:
        trainer = made(world, "dp=2 zero=3")
        average = trainer.average(DECAY)
        for number in range(STEPS):
            trainer.step(batch(number))
        trainer.save(tmp_path / "with")
        with average.applied():
            return trainer.state_dict()

    averaged = run(2, main)[0]
    export(tmp_path / "with", into=tmp_path / "out", build=build, average=True)

    def load(world: World) -> Any:
        trainer = made(world, "dp=2")
        trainer.load(tmp_path / "out")
        return trainer.state_dict()

    agree(run(2, load)[0], averaged, bound=0.0)

    def without(world: World) -> None:
        made(world, "dp=1").save(tmp_path / "without")

    run(1, without)
    with pytest.raises(ValueError, match="no average to export"):
        export(tmp_path / "without", into=tmp_path / "other", build=build, average=True)


def test_an_average_that_nobody_moves_is_not_saved_again(tmp_path: Path) -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=2")
        trainer.average(DECAY)
        trainer.step(batch(0))
        trainer.save(tmp_path / "one")
        other = made(world, "dp=2")
        other.load(tmp_path / "one")
        other.step(batch(1))
        other.save(tmp_path / "two")

    run(2, main)
    with pytest.raises(ValueError, match="no average"):
        export(tmp_path / "two", into=tmp_path / "out", build=build, average=True)


def test_the_block_of_an_average_refuses_to_train_and_save(tmp_path: Path) -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=2")
        average = trainer.average(DECAY)
        with average.applied(), pytest.raises(RuntimeError, match="averages already"), average.applied():
            pass
        trainer.step(batch(0))
        with average.applied():
            for act in (lambda: trainer.step(batch(1)), trainer.open_step, lambda: trainer.save(tmp_path / "x")):
                with pytest.raises(RuntimeError, match=r"leave the block of average\.applied"):
                    act()
        trainer.step(batch(1))

    run(2, main)


@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
def test_a_decay_outside_of_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        run(1, lambda world: made(world, "dp=1").average(decay))


def test_offloaded_state_is_refused() -> None:
    with pytest.raises(PlanError, match="use offload=none"):
        run(1, lambda world: made(world, "dp=1 offload=optimizer:cpu").average(0.9))
