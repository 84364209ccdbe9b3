"""Test `overlap_gather=1`: the numbers of one process, and no read of a parameter that has not arrived."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, outcome, run
from warm_processes import Processes

BOUND = 1e-9
KEY = "overlap_gather=1"
SPLITS = {
    "dp": "dp=2",
    "more ranks than rows": "dp=3 microbatches=3",
    "groups": "dp=2x2",
    "tp": "dp=2 tp=2",
    "2d": "dp=2 tp=4 tp_mode=2d",
    "1f1b": "dp=2 pp=2 microbatches=2 schedule=1f1b",
    "two stages on a rank": "dp=2 pp=2 microbatches=2 schedule=interleaved virtual_stages=2",
    "recomputed": "dp=2 recompute=full",
    "joined": "dp=2 bucket=25M",
    "cpu": "dp=2 offload=optimizer:cpu",
    "disk": "dp=2 offload=optimizer:disk",
}


def build(*, tied: bool) -> nn.Module:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=16, mlp_ratio=2, tied=tied, bias=True)
    model = GPT(shape).double()
    model.get_submodule("positions").requires_grad_(False)
    model.get_submodule("blocks.0.mlp").requires_grad_(False)
    return model


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(16, (rows, 5), generator=generator) for rows in (12, 2, 7)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def training(plan: str = "dp=1") -> Mapping[str, Any]:
    options = Options(clip_norm=0.5, example=batches()[0] if "pp" in plan else None)
    return {"loss": next_token_loss, "options": options, "lr": 1e-2, "weight_decay": 0.1}


@functools.cache
def expected(*, tied: bool) -> Any:
    return alone(functools.partial(build, tied=tied), batches=batches(), **training())


def made(world: World, plan: str, *, tied: bool = True) -> Trainer:
    return parallelize(functools.partial(build, tied=tied), f"{plan} {KEY}", world=world, **training(plan))


def values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


def is_under_way(trainer: Trainer) -> bool:
    """Return whether trained parameters of the module are NaN, every one of them, and not a single frozen one."""
    there = {name: bool(p.isnan().all()) for module in trainer.modules for name, p in module.named_parameters()}
    off = {name for name in there if "positions" in name or "blocks.0.mlp." in name}
    assert not any(there[name] for name in off)
    found = {is_nan for name, is_nan in there.items() if name not in off}
    assert len(found) <= 1, there
    return found == {True}


def read_in_between(world: World, plan: str, tied: bool = True) -> Any:
    trainer = made(world, plan, tied=tied)
    steps = outcome(trainer, batches=batches())
    trainer.close()
    return steps


def not_read(world: World, plan: str, tied: bool = True) -> Any:
    """Train without a call between the steps, which could wait for the parameters."""
    trainer = made(world, plan, tied=tied)
    losses: list[float] = []
    for batch in batches():
        assert is_under_way(trainer) is bool(losses)
        losses.append(trainer.step(batch).loss)
    assert is_under_way(trainer)
    trainer.close()
    assert not is_under_way(trainer)
    return losses, values(trainer)


GRID = Grid(
    {"split": tuple(SPLITS), "zero": (1, 2), "tied": (True, False)},
    heavy=lambda cell: cell["split"] == "2d",  # 8 ranks
    strength=1,
)


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process(split: str, zero: int, tied: bool) -> None:
    plan = f"{SPLITS[split]} zero={zero}"
    whole, size = expected(tied=tied), Plan.parse(plan).mesh().size
    for losses, parameters in run(size, not_read, args=(plan, tied)):
        agree(losses, [step["loss"] for step in whole], bound=BOUND)
        agree(parameters, whole[-1]["parameters"], bound=BOUND)
    for steps in run(size, read_in_between, args=(plan, tied)):
        agree(steps, whole, bound=BOUND)


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=4 zero=1", "dp=2 pp=2 microbatches=2 zero=2"])
def test_real_processes_are_one_process(plan: str, processes: Processes) -> None:
    for losses, parameters in run(4, not_read, on=processes, args=(plan,)):
        agree(losses, [step["loss"] for step in expected(tied=True)], bound=BOUND)
        agree(parameters, expected(tied=True)[-1]["parameters"], bound=BOUND)


# ---- narrow dtypes -----------------------------------------------------------------------------------------------


def steep(output: Tensor, batch: Any) -> tuple[Tensor, Any]:
    """Return a loss whose gradients overflow in fp16 in a batch of two rows."""
    total, count = next_token_loss(output, batch)
    return total * (1e5 if len(batch[0]) == 1 else 1.0), count


def narrow(world: World, plan: str) -> Any:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2, tied=True)
    trainer = parallelize(lambda: GPT(shape), plan, world=world, **{**training(), "loss": steep})
    results = [trainer.step(batch) for batch in (*batches(), *batches())]
    return [one.loss for one in results], [one.skipped for one in results], values(trainer)


@pytest.mark.grid(Grid({"zero": (1, 2), "precision": ("bf16", "fp16")}, strength=1))
def test_narrow_parameters_have_the_bits_of_the_plan_without_the_key(zero: int, precision: str) -> None:
    plan = f"dp=2 zero={zero} precision={precision}"
    for one, same in zip(run(2, narrow, args=(f"{plan} {KEY}",)), run(2, narrow, args=(plan,)), strict=True):
        assert one[:2] == same[:2]
        assert any(one[1]) is (precision == "fp16")
        assert all(torch.equal(one[2][name], value) for name, value in same[2].items())


# ---- reads between two steps -------------------------------------------------------------------------------------

READS: Mapping[str, Callable[[Trainer], Any]] = {
    "full_parameters": values,
    "state_dict": lambda trainer: trainer.state_dict(),
    "evaluate": lambda trainer: trainer.evaluate([batches()[0]]),
    "predict": lambda trainer: trainer.predict(batches()[0]),
    "close": lambda trainer: trainer.close(),
}


READING = Grid(
    {"plan": ("dp=2 zero=1", "dp=2 zero=2 pp=2 microbatches=2"), "read": tuple(READS)},
    heavy=lambda cell: "pp=" in cell["plan"] and cell["read"] not in ("evaluate", "full_parameters"),
)


@pytest.mark.grid(READING)
def test_parameters_are_nan_until_a_read_or_a_forward_waits(plan: str, read: str) -> None:
    def main(world: World) -> dict[str, Tensor]:
        trainer = made(world, plan)
        assert not is_under_way(trainer)
        trainer.step(batches()[0])
        assert is_under_way(trainer)
        READS[read](trainer)
        assert not is_under_way(trainer)
        return values(trainer)

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected(tied=True)[0]["parameters"], bound=BOUND)


def test_the_module_waits_when_the_script_calls_it() -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=2 zero=1")
        trainer.step(batches()[0])
        with torch.no_grad():
            output = trainer.model(batches()[1][0].to(world.device))
        torch.testing.assert_close(output, trainer.predict(batches()[1]), rtol=0, atol=0)

    run(2, main)


def test_the_state_of_the_module_is_refused_as_under_zero_3() -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=2 zero=1")
        trainer.step(batches()[0])
        with pytest.raises(RuntimeError, match=r"overlap_gather=1.*Call trainer\.state_dict\(\) on every rank"):
            trainer.model.state_dict()

    run(2, main)


@pytest.mark.grid(
    Grid(
        {"plan": ("dp=2 zero=1", "dp=2 zero=2 tp=2", "dp=2 zero=1 pp=2 microbatches=2")},
        heavy=lambda cell: "tp=" in cell["plan"],
    )
)
def test_a_checkpoint_between_two_steps(plan: str, tmp_path: Path) -> None:
    def main(world: World) -> Any:
        trainer = made(world, plan)
        trainer.step(batches()[0])
        saving = trainer.save(tmp_path / "one", wait=False)
        trainer.step(batches()[1])
        saving.wait()
        trainer.load(tmp_path / "one")  # over parameters that are under way
        assert not is_under_way(trainer)
        first = values(trainer)
        for batch in batches()[1:]:
            trainer.step(batch)
        return first, values(trainer)

    whole = expected(tied=True)
    for first, last in run(Plan.parse(plan).mesh().size, main):
        agree(first, whole[0]["parameters"], bound=BOUND)
        agree(last, whole[-1]["parameters"], bound=BOUND)


def test_an_average_is_the_average_of_the_plan_without_the_key() -> None:
    def main(world: World, plan: str) -> Any:
        trainer = parallelize(functools.partial(build, tied=True), plan, world=world, **training())
        average = trainer.average(0.7)
        found = []
        for batch in batches():
            trainer.step(batch)
            with average.applied():
                found.append(values(trainer))
        return found, values(trainer)

    for one, same in zip(*(run(2, main, args=(f"dp=2 zero=1 {key}",)) for key in (KEY, "")), strict=True):
        agree(one, same, bound=0.0)


# ---- other steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2])
def test_open_steps(zero: int) -> None:
    def main(world: World) -> Any:
        trainer = made(world, f"dp=2 zero={zero}")
        for batch in batches():
            with trainer.open_step() as step:
                step.backward(step.loss(batch) * 0.25)
                step.backward(step.loss(batch) * 0.75)
                step.update()
            assert is_under_way(trainer)
        return values(trainer)

    for found in run(2, main):
        agree(found, expected(tied=True)[-1]["parameters"], bound=BOUND)


class Fails(nn.Module):
    """A layer that no forward uses while `uses` is False, and a forward that raises while `raises` is True.

    The bias of the last layer is used before the layer runs, in a way the source does not show."""

    uses, raises = True, False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x + getattr(self, "thi" + "rd").bias)) * self.scale
        if self.raises:
            raise ArithmeticError
        x = torch.tanh(self.second(x)) if self.uses else x
        output: Tensor = self.third(x)
        return output


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def rows() -> list[Tensor]:
    return list(torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))


def unusual(world: World, plan: str, kind: str) -> Any:
    """Train five steps, some of them as `kind` says, and return their losses and the parameters."""
    trainer = parallelize(lambda: Fails().double(), plan, world=world, loss=squares, lr=1e-2, weight_decay=0.1)
    model: Any = trainer.model
    losses = []
    for number, batch in enumerate(rows()):
        if kind == "unused":
            model.uses = number not in (1, 2)
        if kind == "frozen":
            model.get_submodule("second").requires_grad_(number % 2 == 0)
        if kind == "raises" and number in (1, 3):
            model.raises = True
            with pytest.raises(ArithmeticError):
                trainer.step(batch)
            model.raises = False
        if kind == "skipped" and number in (1, 3):
            with trainer.open_step() as step:
                step.backward(step.loss(batch))
                step.skip()
        losses.append(trainer.step(batch).loss)
    return losses, values(trainer)


@pytest.mark.parametrize("kind", ["unused", "frozen", "raises", "skipped"])
@pytest.mark.parametrize("zero", [1, 2])
def test_unusual_steps_have_the_bits_of_the_plan_without_the_key(zero: int, kind: str) -> None:
    plan = f"dp=2 zero={zero}"
    for one, same in zip(*(run(2, unusual, args=(f"{plan} {key}", kind)) for key in (KEY, "")), strict=True):
        agree(one, same, bound=0.0)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "dp=2 server=1"])
def test_a_plan_that_gathers_nothing_after_an_update_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match=r"Nearest that works: '(?!.*overlap_gather)"):
        Plan.parse(f"{plan} {KEY}")


def test_one_rank_has_its_parameters_at_once() -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=1 zero=1")
        trainer.step(batches()[0])
        assert not is_under_way(trainer)

    run(1, main)
