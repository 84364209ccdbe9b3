"""Test memory that other processes map: when it is lent, when the system has no more, and in a forked process."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshwise.comm.shared_memory.group_queue import RECORDS_PER_QUEUE, QueueState
from meshwise.comm.shared_memory.host_connection import Board
from meshwise.comm.shared_memory.shared_segment import TensorSlabs, open_segment
from warm_command import WarmCommand

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


def test_a_slab_that_goes_while_one_is_looked_for_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when garbage is collected just then."""
    slabs = TensorSlabs()
    held = [slabs.empty(100, dtype=torch.float64) for _ in range(3)]
    held.pop()

    def fits(size: int, *, slab: int) -> bool:
        held.clear()
        return size <= slab

    monkeypatch.setattr("meshwise.comm.shared_memory.shared_segment.fits", fits)
    x = slabs.empty(100, dtype=torch.float64).fill_(3)
    other = open_segment(os.getpid(), place=slabs.locate(x)[0])  # type: ignore[index] # it is in shared memory
    assert other[:800].view(torch.float64).equal(x)


def test_a_brief_loan_takes_any_unused_slab_that_is_large_enough() -> None:
    slabs = TensorSlabs()
    place, _ = slabs.locate(slabs.lend(1 << 20, dtype=torch.uint8))  # type: ignore[misc] # it is in shared memory
    brief = slabs.lend(1 << 10, dtype=torch.uint8, briefly=True)
    assert slabs.locate(brief) == (place, 0)
    del brief
    longer = slabs.lend(1 << 10, dtype=torch.uint8)
    assert slabs.locate(longer)[0] != place  # type: ignore[index]


def test_a_slab_of_a_brief_loan_has_room_for_a_larger_one() -> None:
    slabs = TensorSlabs()
    place, _ = slabs.locate(slabs.lend(1 << 20, dtype=torch.uint8, briefly=True))  # type: ignore[misc]
    assert slabs.locate(slabs.lend(5 << 18, dtype=torch.uint8, briefly=True)) == (place, 0)


def memories() -> set[str]:
    """Ours that are open here. Whatever else the process has open may come and go in other threads."""
    files = {str(entry): os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    return {number for number, file in files.items() if "/memfd:meshwise-" in file}


def test_where_the_system_gives_no_more_a_tensor_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = TensorSlabs()
    monkeypatch.setattr(os, "ftruncate", mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    opened = memories()
    x = slabs.empty(100_000, dtype=torch.float64)
    assert x.numel() == 100_000
    assert slabs.locate(x) is None
    with pytest.raises(OSError, match="Too many open files"):
        slabs.lend(100_000, dtype=torch.float64)
    assert not memories() - opened


COPY = """
import os, torch
from meshwise.comm.shared_memory.shared_segment import TensorSlabs
slabs = TensorSlabs()
slabs.empty(100, dtype=torch.float64)
(ready, go), (filled, done) = os.pipe(), os.pipe()
if not os.fork():
    os.read(ready, 1)
    slabs.empty(100, dtype=torch.float64).fill_(9)
    os.write(done, b"1")
    os._exit(0)
x = slabs.empty(100, dtype=torch.float64).fill_(1)
os.write(go, b"1")
os.read(filled, 1)
print(x.unique().tolist(), slabs.locate(x) is not None)
"""


@pytest.mark.processes
def test_a_copy_of_the_process_does_not_lend_its_memory() -> None:
    status, said, _ = WarmCommand("-c", COPY).end()
    assert (status, said) == (0, "[1.0] True\n")


def test_a_board_takes_fewer_addresses_where_they_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(Board.make().words) == 4 << 27
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, resource.RLIM_INFINITY))
    assert len(Board.make().words) == 1 << 27


def test_a_board_has_room_for_the_queues_of_many_groups() -> None:
    board = Board.make()
    other = Board(open_segment(os.getpid(), place=board.place), place=board.place)
    for key in range(1900):
        QueueState.make(board, key=key, ranks=2).write_record(RECORDS_PER_QUEUE - 1, tag=key, locations=())
        side = QueueState.find(other, key=key, ranks=2)
        assert side is not None
        assert not side.has_posted(RECORDS_PER_QUEUE - 1, tag=key)
