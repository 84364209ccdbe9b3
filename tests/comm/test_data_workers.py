"""Test processes that ranks start, such as data loaders: their start and their end."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from script_processes import ended

pytestmark = pytest.mark.processes

SIZE = 2

FAILING = """
import multiprocessing, time
import torch
from torch.utils.data import DataLoader, Dataset
from meshwise.comm.launch.launch import run

class Rows(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.full((1000,), float(index))

def main(world):
    rows = iter(DataLoader(Rows(), batch_size=4, num_workers=2))
    next(rows)
    if world.rank:
        other = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,), daemon=True)
        other.start()
        raise ValueError("the loss of a user")
    world.barrier()

if __name__ == "__main__":
    try:
        run({size}, main)
    except ValueError as error:
        print(error)
"""


def method(_world: World) -> str:
    return multiprocessing.get_start_method()


@pytest.mark.parametrize("wanted", [None, "spawn"])
def test_ranks_start_theirs_as_their_launcher_would(wanted: str | None) -> None:
    kept = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(wanted, force=True)
    try:
        assert run(SIZE, method) == [multiprocessing.get_start_method()] * SIZE
    finally:
        multiprocessing.set_start_method(kept, force=True)


def test_those_of_ranks_that_fail_or_are_ended_end_too_and_say_nothing(tmp_path: Path) -> None:
    said = ended(FAILING.format(size=SIZE), folder=tmp_path, TMPDIR=str(tmp_path))
    assert (said.stdout, said.stderr) == ("the loss of a user\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
