"""Units that are updated when their gradients arrive, during the backward of others, get the same bits."""

import errno
import functools
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Cell, Grid
from memory.offloaded_model import (
    CLIPPED,
    EARLY,
    WIDTH,
    batches,
    is_refused_until_a_load,
    outcome,
    the_same,
    trained,
    under,
)
from meshwise.base.timeline import Timeline, TimelineRow
from meshwise.comm import World
from meshwise.engine.parallelize import Options
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer, measure
from meshwise.memory.swap_file import TierError
from meshwise.testing import Counts, count, run

PLAIN = replace(CLIPPED, clip_norm=None)
TIERS = ("optimizer:cpu", "optimizer:disk", "optimizer:disk,gradients:disk", "optimizer:disk,params:disk")


@functools.cache
def at_the_end(ranks: int, plan: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run(ranks, functools.partial(trained, plan=plan, options=PLAIN))[0]
    return found


def exists(cell: Cell) -> bool:
    return cell["zero"] == 3 or "params" not in cell["tiers"]


@pytest.mark.grid(Grid({"tiers": TIERS, "zero": (0, 1, 2, 3), "dp": (1, 2), "microbatches": (1, 2)}, exists=exists))
def test_early_updates_give_the_bits_of_late_ones(tiers: str, zero: int, dp: int, microbatches: int) -> None:
    plan = f"dp={dp} zero={zero} microbatches={microbatches}"
    for own in run(dp, functools.partial(trained, plan=f"{plan} offload={tiers}", options=EARLY)):
        the_same(own, at_the_end(dp, plan))


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 zero=3 precision=bf16",
        "tp=2 zero=3",
        "dp=2 pp=2 zero=3 microbatches=2",
        "dp=2 recompute=full budget=1G zero=3",
    ],
)
def test_early_updates_with_other_ways_of_splitting(plan: str) -> None:
    options, plain = (replace(given, recomputed=("blocks.*",)) for given in (EARLY, PLAIN))
    ranks = 4 if "pp" in plan else 2
    expected = run(ranks, functools.partial(trained, plan=plan, options=plain))[0]
    tiers = "optimizer:disk,gradients:disk,params:disk"
    for own in run(ranks, functools.partial(trained, plan=f"{plan} offload={tiers}", options=options)):
        the_same(own, expected)


# ---- when --------------------------------------------------------------------------------------------------------


def steps(world: World, plan: str, options: Options) -> tuple[Timeline, Counts]:
    """A step in which the backward of the first block waits a moment for an update; and the calls of another one.

    An update begins when the unit behind the next one has its gradients, so the last of four blocks is updated then."""
    trainer = under(world, plan, options=options, layers=4)
    trainer.step(batches()[0])
    updates = lambda: sum(moved.kind == "update" for moved in trainer.tiers.moved)  # noqa: E731
    before = updates()

    def linger(_: Tensor) -> None:
        until = time.monotonic() + (100 if options is EARLY else 0.1)
        while updates() == before and time.monotonic() < until:
            time.sleep(0.001)
        assert (updates() > before) is (options is EARLY)

    first: Any = trainer.model.blocks[0]  # type: ignore[index]
    handle = first.register_forward_hook(lambda *given: given[2].register_hook(linger) and None)
    with measure(trainer) as measuring:
        trainer.step(batches()[1])
    handle.remove()
    with world.record() as records:
        trainer.step(batches()[2])
    trainer.close()
    [step] = measuring.steps()
    return step.step, count(records)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_measured_step_shows_units_updated_while_the_backward_goes_on(tier: str) -> None:
    def during(options: Options) -> list[str]:
        timeline, _ = run(2, steps, args=(f"dp=2 zero=1 offload=optimizer:{tier}", options))[0]
        [backward] = [event for event in timeline.events if event.kind == "B" and event.rank == 0]
        beside = [event for event in timeline.events if event.stream is TimelineRow.TIERS and event.rank == 0]
        assert sum(event.kind == "update" for event in beside) >= 1
        return [event.kind for event in beside if event.start < backward.stop]

    assert "update" in during(EARLY)
    assert not during(CLIPPED)


def test_an_early_step_has_one_more_all_reduce_of_one_number() -> None:
    plan = "dp=2 zero=1 offload=optimizer:cpu"
    early, late = (run(2, steps, args=(plan, options))[0][1] for options in (EARLY, PLAIN))
    more = {kind: (early[kind][0] - calls, early[kind][1] - size) for kind, (calls, size) in late.items()}
    assert {kind: change for kind, change in more.items() if any(change)} == {"all_reduce[dp]": (1, 8)}


@pytest.mark.parametrize("options", [PLAIN, replace(EARLY, clip_norm=0.5), replace(EARLY, nonfinite="skip:2")])
def test_options_that_clip_or_skip_update_after_the_backward(options: Options) -> None:
    def main(world: World) -> None:
        trainer = under(world, "offload=optimizer:disk", options=options)
        with pytest.raises(NonFiniteError) if options.nonfinite != "skip:2" else pytest.MonkeyPatch.context():
            trainer.step(spoiled("blocks.0.weight", trainer))
        for batch in batches():
            trainer.step(batch)
        whole = under(world, "dp=1", options=options)
        for batch in batches():
            whole.step(batch)
        the_same(outcome(trainer), outcome(whole))

    run(1, main)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def spoiled(name: str, trainer: Trainer) -> Tensor:
    """A batch in whose backward the gradient of one parameter is not finite, once."""
    parameter = dict(trainer.model.named_parameters())[name]

    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * math.inf

    handle = parameter.register_hook(spoil)
    return batches()[1]


def test_a_loss_that_is_not_finite_updates_nothing_and_training_may_continue() -> None:
    def main(world: World) -> None:
        trainer = under(world, "dp=2 zero=2 offload=optimizer:disk", options=EARLY)
        with pytest.raises(NonFiniteError, match="the update was not applied"):
            trainer.step(torch.full((8, WIDTH), math.nan))
        for batch in batches():
            trainer.step(batch)
        found = outcome(trainer)
        the_same(found, {name: at_the_end(2, "dp=2 zero=2")[name] for name in found})
        trainer.close()

    run(2, main)


@pytest.mark.parametrize(
    "plan", ["dp=2 zero=1 offload=optimizer:cpu", "dp=2 zero=3 offload=optimizer:disk,params:disk"]
)
def test_a_late_gradient_that_is_not_finite_is_an_error_until_a_load(plan: str, tmp_path: Path) -> None:
    def main(world: World) -> None:
        trainer = under(world, plan, options=EARLY)
        first, second, _ = batches()
        trainer.step(first)
        trainer.save(tmp_path / "saved")
        with pytest.raises(NonFiniteError, match=r"are updated already, so load a checkpoint to continue"):
            trainer.step(spoiled("blocks.0.weight", trainer) if world.rank == 0 else second)
        is_refused_until_a_load(trainer, folder=tmp_path)
        found = outcome(trainer)
        the_same(found, {name: at_the_end(2, plan.partition(" off")[0])[name] for name in found})
        trainer.close()

    run(2, main)


def test_a_disk_that_fails_during_an_early_update_is_a_tier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def main(world: World) -> None:
        trainer = under(world, "offload=optimizer:disk", options=EARLY)
        trainer.step(batches()[0])
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", broken)
            with pytest.raises(TierError, match=r"cannot write a tensor of the swap file in .*: Input/output error"):
                trainer.step(batches()[1])
        with pytest.raises(TierError, match="part old and part new"):
            trainer.step(batches()[2])
        trainer.close()

    run(1, main)


def test_training_does_not_continue_after_a_backward_that_ended_half_way() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the model")

    def main(world: World) -> None:
        trainer = under(world, "offload=optimizer:cpu", options=EARLY)
        handle = dict(trainer.model.named_parameters())["blocks.0.weight"].register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the model"):
            trainer.step(batches()[0])
        handle.remove()
        with pytest.raises(TierError, match="part old and part new"):
            trainer.step(batches()[0])
        trainer.close()

    run(1, main)


@pytest.mark.parametrize("tiers", ["optimizer:cpu", "optimizer:disk,gradients:disk"])
def test_a_backward_that_ends_before_anything_was_updated_is_forgotten(tiers: str) -> None:
    """In the last micro-batch, when the reduction of the first unit is under way."""
    calls = list[None]()

    def fail(_: Tensor) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("a hook of the model")

    def main(world: World) -> None:
        trainer = under(world, f"zero=2 microbatches=2 offload={tiers}", options=EARLY)
        handle = dict(trainer.model.named_parameters())["blocks.1.weight"].register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the model"):
            trainer.step(batches()[0])
        handle.remove()
        for batch in batches():
            trainer.step(batch)
        found = outcome(trainer)
        the_same(found, {name: at_the_end(1, "zero=2 microbatches=2")[name] for name in found})
        trainer.close()

    run(1, main)


class Slow(torch.optim.AdamW):
    """Whose update takes a while."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def test_a_load_waits_for_the_early_updates_of_a_backward_that_failed(tmp_path: Path) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the model")

    def main(world: World) -> None:
        trainer = under(world, "offload=optimizer:cpu", options=EARLY, kind=Slow)
        trainer.step(batches()[0])
        trainer.save(tmp_path / "saved")
        before = {name: value.clone() for name, value in trainer.full_parameters()}
        handle = dict(trainer.model.named_parameters())["blocks.0.weight"].register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the model"):
            trainer.step(batches()[1])
        handle.remove()
        trainer.load(tmp_path / "saved")
        time.sleep(0.2)
        the_same(dict(trainer.full_parameters()), before)
        trainer.step(batches()[1])
        trainer.close()

    run(1, main)
