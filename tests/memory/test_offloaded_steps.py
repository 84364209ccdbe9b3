"""Test steps with state on a tier that are measured, that are left out, or that raise."""

import math
from dataclasses import replace

import pytest
from torch import Tensor

from memory.offloaded_model import CLIPPED, batches, outcome, the_same, under
from meshwise.base.step_timeline import Timeline, TimelineRow
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer, measure
from meshwise.testing import run

PLAIN = replace(CLIPPED, clip_norm=None)


def measured(world: World, plan: str) -> Timeline:
    trainer = under(world, plan, layers=4)
    trainer.step(batches()[0])
    with measure(trainer) as measuring:
        trainer.step(batches()[1])
    trainer.close()
    [step] = measuring.steps()
    return step.step


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_measured_step_shows_its_updates_after_the_backward(tier: str) -> None:
    timeline = run(2, measured, args=(f"dp=2 zero=1 offload=optimizer:{tier}",))[0]
    [backward] = [event for event in timeline.events if event.kind == "B" and event.rank == 0]
    beside = [event for event in timeline.events if event.row is TimelineRow.TIERS and event.rank == 0]
    assert sum(event.kind == "update" for event in beside) >= 1
    assert all(event.start >= backward.stop for event in beside)


def spoiled(name: str, trainer: Trainer) -> Tensor:
    """A batch in whose backward the gradient of one parameter is not finite, once."""
    parameter = dict(trainer.model.named_parameters())[name]

    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * math.inf

    handle = parameter.register_hook(spoil)
    return batches()[1]


@pytest.mark.parametrize("options", [PLAIN, replace(PLAIN, nonfinite="skip:2")])
def test_a_step_that_is_not_finite_changes_nothing(options: Options) -> None:
    def main(world: World) -> None:
        trainer = under(world, "offload=optimizer:disk", options=options)
        with pytest.raises(NonFiniteError) if options.nonfinite != "skip:2" else pytest.MonkeyPatch.context():
            trainer.step(spoiled("blocks.0.weight", trainer))
        for batch in batches():
            trainer.step(batch)
        never = under(world, "offload=optimizer:disk", options=options)
        for batch in batches():
            never.step(batch)
        the_same(outcome(trainer), outcome(never))

    run(1, main)
