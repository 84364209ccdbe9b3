"""Copies of processes, by a fork: of a rank, which are no ranks, and of a launcher, which are launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.comm import World, run
from scripts import ended, ended_ranks

pytestmark = pytest.mark.processes

SIZE = 2
COPIED = """
import os, sys
from meshwise.comm import run

def main(world):
    return world.rank

if __name__ == "__main__":
    print(run({size}, main), flush=True)
    copy = os.fork()
    if not copy:
        print("copy", run({size}, main), flush=True)
        sys.exit()
    assert os.waitpid(copy, 0)[1] == 0
    print(run({size}, main), flush=True)
    ended, of_this = os.pipe()
    if not os.fork():  # one that goes on when this process has ended
        os.close(of_this)
        os.read(ended, 1)
        print("left", run({size}, main), flush=True)
"""

# A copy that is made while another thread starts ranks.
COPIED_AT_ONCE = """
import multiprocessing, os, sys, threading
from meshwise.comm import run
from meshwise.comm.launch import agent

def main(world):
    return world.rank

def starts(*args, ordinary=agent.LocalElasticAgent._start_workers):
    started.set()
    go_on.wait()
    return ordinary(*args)

if __name__ == "__main__":
    started, go_on = threading.Event(), threading.Event()
    agent.LocalElasticAgent._start_workers = starts
    thread = threading.Thread(target=lambda: print(run({size}, main), flush=True))
    thread.start()
    started.wait()
    copy = os.fork()
    go_on.set()
    if not copy:
        print("copy", run({size}, main), multiprocessing.get_context("spawn").Lock()._semlock.name[:4], flush=True)
        sys.exit()
    assert os.waitpid(copy, 0)[1] == 0
    thread.join()
"""


def copies(world: World, way: str) -> tuple[int, float]:
    """The status of a copy of this rank that `main` makes, and a sum of the ranks afterwards."""
    pid = os.fork()
    if not pid:
        if way == "calls":
            world.all_reduce(torch.ones(1), axes="rank").wait()
        if way == "exits":
            sys.exit(7)
        return 0, 0.0
    _, status = os.waitpid(pid, 0)
    x = torch.ones(1)
    world.all_reduce(x, axes="rank").wait()
    return os.waitstatus_to_exitcode(status), x.item()


@pytest.mark.parametrize("comm", ["local", "gloo"])
@pytest.mark.parametrize("way, status", [("calls", 1), ("exits", 7), ("returns", 0)])
def test_a_copy_of_a_rank_is_no_rank(way: str, status: int, comm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(SIZE, copies, args=(way,), comm=comm) == [(status, 2.0)] * SIZE
    assert ("is a copy of a rank" in capfd.readouterr().err) == (way == "calls")


COPIES_ITSELF = """
import os, torch, meshwise
world = meshwise.connect()
if world.rank == 1 and not os.fork():
    raise ValueError("in a copy")
if world.rank == 1:
    os.wait()
x = torch.ones(1)
world.all_reduce(x, axes="rank").wait()
print(x.item())
"""


def test_a_copy_of_a_rank_that_was_started_by_others_ends_by_itself() -> None:
    for number, (status, out, errors) in enumerate(ended_ranks(COPIES_ITSELF, size=2)):
        assert (status, out) == (0, "2.0\n"), errors
        assert errors.count("Traceback") == errors.count("ValueError: in a copy") == number


def test_a_copy_of_a_launcher_starts_ranks_of_its_own(tmp_path: Path) -> None:
    said = ended(COPIED.format(size=SIZE), folder=tmp_path)
    assert (said.stdout, said.stderr) == ("[0, 1]\ncopy [0, 1]\n[0, 1]\nleft [0, 1]\n", "")


def test_so_does_one_that_is_made_while_ranks_are_started(tmp_path: Path) -> None:
    said = ended(COPIED_AT_ONCE.format(size=SIZE), folder=tmp_path)
    assert (sorted(said.stdout.splitlines()), said.stderr) == (["[0, 1]", "copy [0, 1] /mp-"], "")
