"""A disk that fails during a training is an error at once. Half updated parameters are refused until a load."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memory.offloaded_model import CLIPPED, SMALL, batches, is_refused_until_a_load, outcome, the_same, under
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import Options
from meshwise.engine.trainer import Trainer
from meshwise.memory.swap_file import TierError

PLAN = "zero=3 offload=optimizer:disk,params:disk"


def at(folder: Path) -> Options:
    return replace(CLIPPED, swap=replace(SMALL, folder=folder))


def fails(call: Callable[..., int], *, after: int) -> Callable[..., int]:
    """A system call that meets a broken disk after so many good ones."""
    left = iter(range(after))

    def instead(*arguments: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return call(*arguments)

    return instead


def test_an_update_that_fails_half_way_is_neither_used_nor_saved_until_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(world: World) -> None:
        trainer = under(world, PLAN)
        first, second, _ = batches()
        trainer.step(first)
        trainer.save(tmp_path / "saved")
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwritev", fails(os.pwritev, after=5))
            with pytest.raises(TierError, match=r"cannot write a tensor of the swap file in .*: Input/output error"):
                trainer.step(second)
        is_refused_until_a_load(trainer, folder=tmp_path)
        whole = under(world, "dp=1")
        for batch in batches():
            whole.step(batch)
        the_same(outcome(trainer), outcome(whole))
        trainer.close()

    run_threads(1, main)


def test_a_disk_that_fails_during_a_gather_is_a_tier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: World) -> None:
        trainer = under(world, PLAN)
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", fails(os.preadv, after=1))
            with pytest.raises(TierError, match=r"cannot read a tensor of the swap file in .*: Input/output error"):
                trainer.step(batches()[0])
        results = [trainer.step(batch) for batch in batches()]
        whole = under(world, "dp=1")
        assert [whole.step(batch).loss for batch in batches()] == [result.loss for result in results]
        trainer.close()

    run_threads(1, main)


def test_a_disk_without_room_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 1 << 18:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def main(world: World) -> None:
        with pytest.raises(TierError, match="has no room for the swap file: No space left on device; 16384 bytes are"):
            under(world, PLAN, options=at(tmp_path))

    run_threads(1, main)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_error_when_the_plan_is_applied(tmp_path: Path) -> None:
    def main(world: World) -> None:
        with pytest.raises(TierError, match=r"no swap file can be made in .*gone: No such file"):
            under(world, PLAN, options=at(tmp_path / "gone"))

    run_threads(1, main)


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.close()


def test_a_folder_may_be_removed_during_training(tmp_path: Path, trainers: list[Trainer]) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()

    def main(world: World) -> None:
        trainers.append(under(world, PLAN, options=at(folder)))
        trainers[0].step(batches()[0])
        folder.rmdir()
        for batch in batches()[1:]:
            trainers[0].step(batch)
        whole = under(world, "dp=1")
        for batch in batches():
            whole.step(batch)
        the_same(outcome(trainers[0]), outcome(whole))

    run_threads(1, main)


def test_memory_is_reported_by_tier(trainers: list[Trainer]) -> None:
    def main(world: World) -> None:
        for plan in ("dp=1", PLAN):
            trainers.append(under(world, plan))
            trainers[-1].step(batches()[0])

    run_threads(1, main)
    whole, spread = (trainer.memory() for trainer in trainers)
    assert spread["disk/parameters"] == whole["parameters"]
    assert spread["disk/optimizer"] + spread["optimizer"] >= whole["optimizer"]
    assert spread["parameters"] == 0
    assert spread["optimizer"] < whole["optimizer"] / 1000  # the numbers of steps
    assert 0 < spread["staging"] <= 2 * SMALL.buffer + 3 * 4 * (128 * 128 + 4096)
    assert torch.tensor(list(spread.values())).min() >= 0
