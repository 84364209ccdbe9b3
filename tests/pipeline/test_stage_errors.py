"""An error on one stage names its stage and micro-batch, and ends all ranks soon."""

import functools
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.plan import Plan
from meshwise.testing import agree, run
from warm_processes import Processes

SECONDS = 35.0
"""For all ranks to have ended, on a machine that does much else."""

CALLS = 4 + 3  # a step of four micro-batches, and the third of the next


class Faulty(nn.Linear):
    """A layer that fails when it has run seven times."""

    def __init__(self, fault: str) -> None:
        super().__init__(8, 8)
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.device.type != "meta"  # the cut runs it without values
        y = super().forward(x)
        if self.calls == CALLS:
            if self.fault == "forward":
                raise ZeroDivisionError("of the user's own making")
            if self.fault == "backward":
                y.register_hook(_fail)
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return y


def _fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError("of the user's own making")


def model(fault: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), Faulty(fault), nn.Linear(8, 3))


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


def fail(world: World, plan: str, fault: str) -> None:
    build = functools.partial(model, fault)
    trainer = parallelize(build, plan, loss=squares, world=world, options=Options(example=batch()), lr=1e-2)
    trainer.step(batch())
    print(f"second step at {time.time()}", flush=True)
    trainer.step(batch())


def error_text(caught: pytest.ExceptionInfo[Any]) -> str:
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, ValueError])
def test_an_error_of_the_model_during_the_cut_is_raised_unchanged(kind: type[Exception]) -> None:
    class Broken(nn.Sequential):
        def forward(self, _x: Tensor) -> Tensor:
            raise kind("of the user's own making")

    def main(world: World) -> Exception:
        with pytest.raises(Exception, match="of the user's own making") as caught:
            parallelize(
                Broken(nn.Linear(4, 8), nn.Linear(8, 3)),
                "pp=2",
                loss=squares,
                world=world,
                options=Options(example=batch()),
                lr=1e-2,
            )
        return caught.value

    assert [type(error) for error in run(2, main)] == [kind, RankLostError]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("fault, action", [("forward", "2F2"), ("backward", "2[BI]2")])
def test_an_error_names_its_stage_and_micro_batch(schedule: str, fault: str, action: str) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user's own making") as caught:
        run(4, fail, args=(f"pp=4 microbatches=4 schedule={schedule}", fault))
    assert re.search(rf"in {action}: stage 2, micro-batch 2, on rank 2 of the pipeline", error_text(caught))


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["backward", "killed"])
def test_an_error_ends_all_processes_within_seconds(
    fault: str, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError if fault == "killed" else ZeroDivisionError) as caught:
        run(3, fail, on=processes, args=("pp=3 microbatches=4", fault))
    ended = time.time()
    began = [float(at) for at in re.findall(r"second step at (\S+)", capsys.readouterr().out + error_text(caught))]
    assert ended - min(began) < SECONDS
    if fault == "killed":
        lost = r"was lost in .*(its process has ended|Connection closed)|of 3 processes ended by signal SIGKILL"
        assert re.search(rf"rank \d ({lost})", error_text(caught))
    else:
        assert re.search(r"in \d[BI]2: stage \d, micro-batch 2, on rank \d of the pipeline", error_text(caught))
        assert "in _fail" in error_text(caught), "the traceback is the stage's own"


def poisoned(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Not a number on the micro-batches of a batch that is marked."""
    total, count = squares(output, batch)
    return total * (float("nan") if bool((batch[1] > 100).any()) else 1.0), count


def steps() -> list[Any]:
    x, y = batch()
    marked = y.clone()
    marked[5] = 1000.0
    return [(x, y), (x, marked), (x, y)]


def skipping() -> Options:
    return Options(example=batch(), nonfinite="skip:1")


@pytest.mark.parametrize("plan", ["pp=2 microbatches=4", "pp=2 dp=2 zero=2 microbatches=2 schedule=zb-h1"])
def test_a_loss_that_is_not_a_number_on_the_last_stage_skips_the_step_on_all(plan: str) -> None:
    build = functools.partial(model, "none")

    def main(world: World) -> Any:
        trainer = parallelize(build, plan, loss=poisoned, world=world, options=skipping(), lr=1e-2)
        results = [trainer.step(one) for one in steps()]
        assert [result.skipped for result in results] == [False, True, False]
        return results[1].problem, {name: value.clone() for name, value in trainer.full_parameters()}

    expected = run(1, lambda world: _trained(world, build))[0]
    found = run(Plan.parse(plan).mesh().size, main)
    for problem, parameters in found:
        assert problem == found[0][0]
        assert "the loss is nan" in problem
        agree(parameters, expected, bound=1e-5)


def _trained(world: World, build: Any) -> dict[str, Tensor]:
    """What one process has after the steps that count."""
    trainer = parallelize(build, "dp=1", loss=poisoned, world=world, options=skipping(), lr=1e-2)
    for one in (steps()[0], steps()[2]):
        trainer.step(one)
    return {name: value.clone() for name, value in trainer.full_parameters()}


def test_a_loss_that_is_not_a_number_is_an_error_on_every_rank() -> None:
    def main(world: World) -> str:
        trainer = parallelize(
            functools.partial(model, "none"),
            "pp=3 microbatches=4",
            loss=poisoned,
            world=world,
            options=Options(example=batch()),
            lr=1e-2,
        )
        with pytest.raises(NonFiniteError) as caught:
            trainer.step(steps()[1])
        return str(caught.value)

    errors = run(3, main)
    assert len(set(errors)) == 1
    assert "micro-batch 2" in errors[0]
