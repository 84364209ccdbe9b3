"""A rehearsal predicts the bytes on each tier and of the staging buffers."""

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from memory.offloaded_model import CLIPPED, SMALL, Blocks, batches, squares, under
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import Options
from meshwise.memory.activation_offload import ActivationTransfers
from meshwise.memory.swap_file import BLOCK
from meshwise.plan import Plan
from meshwise.simulate.predicted_memory import RankMemory, memory_of, memory_table
from meshwise.simulate.rehearsal import Device, RehearsalSubject, rehearse
from meshwise.simulate.step_tape import Category

STATES = 4 * sum(parameter.numel() for parameter in Blocks().parameters())


THREE = replace(CLIPPED, swap=replace(SMALL, buffers=3))
MOVING = replace(CLIPPED, saving=ActivationTransfers(least=1024, ahead=1, staged=8192))
"""Activations move by themselves, through two buffers."""


def rehearsed(plan: str, *, device: Device = "cpu", options: Options = CLIPPED) -> RankMemory:
    subject = RehearsalSubject(Blocks, squares, batches()[0], options=options)
    [rank] = memory_of(rehearse(subject, plan=plan, ranks=1, device=device))
    return rank


@pytest.mark.parametrize(
    "tiers", ["optimizer:disk", "optimizer:disk,gradients:disk", "optimizer:disk,gradients:disk,params:disk"]
)
def test_a_rehearsal_predicts_the_bytes_on_disk_and_the_staging_buffers_of_a_slow_disk(
    tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> int:
        time.sleep(0.1)
        return pwritev(*arguments)

    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", slow)

    def main(world: World) -> tuple[dict[str, int], int]:
        trainer = under(world, f"zero=3 offload={tiers}", options=THREE)
        for batch in batches()[:2]:
            trainer.step(batch)
        trainer.close()
        return dict(trainer.tiers.disk_bytes), trainer.tiers.staged

    [(away, staged)] = run_threads(1, main)
    rank = rehearsed(f"zero=3 offload={tiers}", options=THREE)
    assert rank.off_device == {"disk": sum(away.values())}
    assert away["optimizer"] >= 2 * STATES
    # Each buffer is a block longer, to begin where a disk may write it: three of the update, and those of parameters.
    assert staged + 3 * BLOCK <= rank.peak.device[Category.STAGING] <= staged + 6 * BLOCK
    titles, row = memory_table([rank])
    assert titles[-1] == "on disk"
    assert row[-1].endswith("KiB")


def test_state_offloaded_from_a_gpu_is_counted_on_the_host() -> None:
    """Also where the rehearsal runs on a machine without one."""
    plain, offloaded = (rehearsed(plan, device="cuda") for plan in ("dp=1", "offload=optimizer:cpu"))
    assert plain.off_device == {}
    assert plain.rest[Category.OPTIMIZER] >= 2 * STATES
    assert offloaded.rest.get(Category.OPTIMIZER, 0) < 1024  # the numbers of steps
    assert Category.STAGING not in offloaded.peak.device
    assert offloaded.off_device["cpu"] >= 3 * STATES  # two of the optimizer, the gradients
    titles, row = memory_table([offloaded])
    assert titles[-1] == "on the host"
    assert row[-1].endswith("KiB")
    assert rehearsed("offload=optimizer:cpu").off_device == {}, "on a CPU it is there already"


def test_the_staging_buffers_of_a_gpu_are_on_the_host() -> None:
    rank = rehearsed("zero=3 offload=params:disk", device="cuda")
    assert Category.STAGING not in rank.peak.device
    assert rank.off_device["disk"] >= STATES
    assert rank.off_device["cpu"] > 0


@pytest.mark.parametrize(
    "plan", ["dp=1", "microbatches=2", "pp=2 microbatches=4 schedule=gpipe", "pp=2 microbatches=4 schedule=1f1b"]
)
def test_activations_on_disk_are_predicted_with_all_micro_batches_in_flight(plan: str) -> None:
    def main(world: World, plan: str) -> int:
        trainer = under(world, plan, options=MOVING)
        trainer.step(batches()[0].clone())
        trainer.close()
        return trainer.memory()["disk/activations"]

    plan = f"{plan} partition=params offload=activations:disk"
    ranks = Plan.parse(plan).mesh().size
    subject = RehearsalSubject(Blocks, squares, batches()[0], options=MOVING)
    predicted = [rank.off_device["disk"] for rank in memory_of(rehearse(subject, plan=plan, ranks=ranks))]
    for most, away in zip(predicted, run_threads(ranks, main, args=(plan,)), strict=True):
        assert away <= most <= 1.25 * away  # micro-batches of a pipeline are views of one batch
        assert "pp" in plan or most == away


def test_activations_on_disk_leave_only_staging_buffers_on_the_device() -> None:
    plain, moved = (rehearsed(plan, options=MOVING) for plan in ("dp=1", "offload=activations:disk"))
    assert moved.rest[Category.STAGING] == 8192
    kept, there = (rank.peak.device[Category.ACTIVATIONS] for rank in (plain, moved))
    assert kept - moved.off_device["disk"] <= there < kept


def test_activations_of_a_gpu_are_counted_on_the_host_and_activations_of_a_cpu_do_not_move() -> None:
    plain, moved = (rehearsed(plan, device="cuda", options=MOVING) for plan in ("dp=1", "offload=activations:cpu"))
    on_disk = rehearsed("offload=activations:disk", device="cuda", options=MOVING)
    assert moved.off_device == {"cpu": on_disk.off_device["disk"]}
    assert on_disk.off_device == {"disk": moved.off_device["cpu"], "cpu": 8192}
    assert moved.peak.bytes == on_disk.peak.bytes < plain.peak.bytes
    stays = rehearsed("offload=activations:cpu", options=MOVING)
    assert stays.off_device == {}
    assert stays.peak == rehearsed("dp=1", options=MOVING).peak
