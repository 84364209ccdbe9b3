"""Test reading and writing the memory of another process."""

from __future__ import annotations

import ctypes
import os
import sys
import uuid

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from meshwise.comm import World
from meshwise.comm.network.job_store import job_store
from meshwise.comm.shared_memory.shared_segment import ProcessMemory
from meshwise.testing import run
from warm_processes import Processes

SIZE = 2


def own_memory_readable() -> bool:
    """Whether this system lets a process be read at all (some containers forbid the call)."""
    if sys.platform != "linux":
        return False
    x = ctypes.c_int64(7)
    span = (ctypes.c_size_t * 2)(ctypes.addressof(x), 8)
    return bool(ctypes.CDLL(None).process_vm_readv(os.getpid(), span, 1, span, 1, 0) == 8)


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not own_memory_readable(), reason="this system lets no process read another's memory"),
]


def store_of(name: str) -> c10d.Store:
    found = job_store()
    assert found is not None
    return c10d.PrefixStore(name, found)


def read_and_write_each_other(world: World, name: str) -> None:
    memory = ProcessMemory(store_of(name), rank=world.rank, size=world.size)
    other = 1 - world.rank
    assert memory.read_by(other)
    x = torch.arange(1000) * (world.rank + 1)
    [first, second] = world.exchange(x.data_ptr())
    found = torch.empty(1000, dtype=torch.int64)
    memory.read(other, address=second if other else first, into=found)
    assert found.equal(torch.arange(1000) * (other + 1))
    with pytest.raises(OSError, match=r"cannot read the memory of process .*: Bad address"):
        memory.read(other, address=8, into=found)
    world.barrier()
    memory.write(other, address=second if other else first, x=torch.full((1000,), 10 + world.rank))
    world.barrier()
    assert x.equal(torch.full((1000,), 10 + other))


def test_ranks_of_one_machine_read_and_write_each_others_memory(processes: Processes) -> None:
    run(SIZE, read_and_write_each_other, on=processes, args=(uuid.uuid4().hex,))
