"""The loss scale of fp16 in training: found at once, lowered on all ranks, kept in checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError, StepResult
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import LossScale
from meshwise.testing import run


class Spike(nn.Module):
    """Gradients overflow fp16 where an input is large; the loss does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Steep.apply(self.layers(x), x[:, :1])  # type: ignore[no-any-return]


class Steep(torch.autograd.Function):
    """Its input, with a gradient that is multiplied by `slope`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def spiked(rows: int = 8) -> list[Tensor]:
    """Three batches; the last row of the second, one rank's alone, overflows."""
    made = [torch.full((rows, 4), 0.5) for _ in range(3)]
    made[1][-1, 0] = 60000.0
    return made


def run_spiked(world: World, plan: str) -> list[tuple[StepResult, dict[str, Tensor]]]:
    options = Options(
        loss_scale=LossScale(32.0), example=spiked()[0], tensor_rules={"layers.0": "colwise", "layers.2": "rowwise"}
    )
    trainer = parallelize(Spike, plan, loss=squares, world=world, lr=1e-2, options=options)
    found = []
    for batch in spiked():
        result = trainer.step(batch)
        found.append((result, {name: value.clone() for name, value in trainer.full_parameters()}))
        if result.skipped:
            with pytest.raises(RuntimeError, match="the last step was skipped"):
                next(iter(trainer.full_gradients()))
    return found


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=4", "dp=2 zero=1", "dp=2 zero=3", "dp=2 tp=2 zero=2", "dp=2 pp=2 microbatches=2"]
)
def test_an_overflow_on_one_rank_is_seen_by_all_and_costs_the_step_alone(plan: str) -> None:
    for first, spike, last in run(Plan.parse(plan).mesh().size, run_spiked, args=(f"{plan} precision=fp16",)):
        assert not first[0].skipped
        assert spike[0].skipped
        assert spike[0].problem == "the gradient overflowed at a loss scale of 32; it is 16 now"
        assert math.isfinite(spike[0].loss)
        assert not last[0].skipped
        assert [result.loss_scale for result, _ in (first, spike, last)] == [32, 32, 16]
        assert all(torch.equal(spike[1][name], value) for name, value in first[1].items())
        assert any(not torch.equal(last[1][name], value) for name, value in first[1].items())


class Averaging(Spike):
    """Keeps statistics of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return Steep.apply(self.layers(self.norm(x)), x[:, :1])  # type: ignore[no-any-return]


def test_a_step_that_is_left_out_leaves_no_trace_in_running_statistics() -> None:
    """Neither the overflow, nor a batch that is not finite, nor the forward that looks for the culprit."""

    def main(world: World) -> None:
        options = Options(loss_scale=LossScale(32.0), nonfinite="skip:1")
        trainer = parallelize(Averaging, "dp=2 precision=fp16", loss=squares, world=world, lr=1e-2, options=options)
        draws = torch.Generator().manual_seed(0)
        trainer.step(torch.randn(8, 4, generator=draws))
        assert int(trainer.model.norm.num_batches_tracked) == 1  # type: ignore[union-attr, arg-type]
        before = {name: value.clone() for name, value in trainer.full_buffers()}
        steep = torch.randn(8, 4, generator=draws)
        steep[0, 0] = 60000.0
        assert trainer.step(steep).problem == "the gradient overflowed at a loss scale of 32; it is 16 now"
        assert trainer.step(torch.full((8, 4), math.nan)).skipped
        for name, value in trainer.full_buffers():
            assert torch.equal(value, before[name]), name

    run(2, main)


def test_a_gradient_that_no_scale_mends_is_an_error() -> None:
    trainer = parallelize(
        Spike, "precision=fp16", loss=squares, lr=1e-2, options=Options(loss_scale=LossScale(2.0**-13))
    )
    batch = spiked()[0]
    batch[0, 0] = math.inf
    assert trainer.step(batch).loss_scale == 2.0**-13
    with pytest.raises(NonFiniteError, match="nearest to the loss first"):
        trainer.step(batch)


@pytest.mark.parametrize("plan", ["dp=1", "dp=3 microbatches=2", "pp=2 microbatches=2"])
def test_the_scale_is_that_of_the_mean_so_no_step_is_lost_to_find_it(plan: str) -> None:
    """The sum of a batch overflows at it."""
    rows = 8 * 2048

    def main(world: World, plan: str) -> list[StepResult]:
        build = lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731
        x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
        trainer = parallelize(build, plan, loss=squares, world=world, lr=1e-2, options=Options(example=x))
        start, stop = trainer.share(rows)
        return [trainer.step(x), trainer.step(x[start:stop], local=True, total=rows)]

    for results in run(Plan.parse(plan).mesh().size, main, args=(f"{plan} precision=fp16",)):
        assert [(result.loss_scale, result.skipped) for result in results] == [(LossScale().value, False)] * 2


def test_the_scale_goes_through_a_checkpoint_to_another_plan(tmp_path: Path) -> None:
    def made(world: World, plan: str, scale: LossScale) -> Trainer:
        return parallelize(Spike, plan, loss=squares, world=world, lr=1e-2, options=Options(loss_scale=scale))

    def begin(world: World) -> float:
        trainer = made(world, "dp=2 precision=fp16", LossScale(LossScale.MOST))
        results = [trainer.step(torch.full((8, 4), 500.0)) for _ in range(2)]
        assert [result.skipped for result in results] == [True, True]
        trainer.save(tmp_path / "saved")
        return trainer.step(spiked()[0]).loss_scale

    def go_on(world: World) -> float:
        trainer = made(world, "dp=1 precision=fp16", LossScale())
        trainer.load(tmp_path / "saved")
        return trainer.step(spiked()[0]).loss_scale

    assert run(2, begin) == [2.0**21] * 2
    assert run(1, go_on) == [2.0**21]
