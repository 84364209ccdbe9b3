"""Read and write the memory of other processes of this host with Linux' process_vm_readv and process_vm_writev.

A message through a socket is copied twice, into the kernel and out again, packet by packet. These system calls copy
once, straight from one process's memory into another's, as MPI libraries do. This takes less than half the processor
time. Whether it is permitted depends on the kernel, the container and the user, so each rank tries to read from every
other rank of its host. Tensors of a rank whose memory cannot be read are copied through shared memory instead."""

import ctypes
import errno
import json
import os
import secrets
import sys

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.same_host import host_name

_PR_SET_PTRACER = 0x59616D61
_ANYONE = -1
_PROBE_BITS = 62


class _Span(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """Access of this rank to the memory of other ranks of its host, where the system permits it. Every rank makes one
    over the same store, and tries to read a number from the memory of every other rank of its host."""

    def __init__(self, store: c10d.Store, *, rank: int, size: int) -> None:
        self._processes: dict[int, int] = {}
        self._readers: set[int] = set()
        machine = host_name() if sys.platform == "linux" else ""  # other systems lack these system calls
        if machine:  # Linux' Yama lets only ancestors read a process, unless the process allows it, as MPI does
            _C.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYONE), 0, 0, 0)
        probe = torch.tensor([secrets.randbits(_PROBE_BITS)])
        store.set(f"probe/{rank}", json.dumps([machine, os.getpid(), probe.data_ptr(), int(probe)]))
        probes = [json.loads(text) for text in store.multi_get([f"probe/{other}" for other in range(size)])]
        for other, (where, process, address, number) in enumerate(probes):
            if machine and where == machine and other != rank and _readable(process, address, expected=number):
                self._processes[other] = process
        store.set(f"reads/{rank}", json.dumps(list(self._processes)))
        reads = store.multi_get([f"reads/{other}" for other in range(size)])
        self._readers = {other for other, text in enumerate(reads) if rank in json.loads(text)}

    def read_by(self, rank: int) -> bool:
        """Return whether `rank` can read this rank's memory."""
        return rank in self._readers

    def read(self, rank: int, *, address: int, into: Tensor) -> None:
        """Copy memory of rank `rank`, from `address` on, into a contiguous CPU tensor. Raises OSError when refused."""
        _copy("read", self._processes[rank], address, into)

    def write(self, rank: int, *, address: int, x: Tensor) -> None:
        """Copy a contiguous CPU tensor into the memory of rank `rank` at `address`. Raises OSError when refused."""
        _copy("write", self._processes[rank], address, x)


def _copy(verb: str, process: int, address: int, x: Tensor) -> None:
    size, done = x.numel() * x.element_size(), 0
    call = _C.process_vm_readv if verb == "read" else _C.process_vm_writev
    while done < size:
        local = _Span(x.data_ptr() + done, size - done)
        remote = _Span(address + done, size - done)
        count = call(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            hint = "; is a tensor in read-only memory, for example of a mapped file?" if number == errno.EFAULT else ""
            raise OSError(number, f"cannot {verb} the memory of process {process}: {os.strerror(number)}{hint}")
        done += count


def _readable(process: int, address: int, *, expected: int) -> bool:
    """Return whether the integer at `address` in a process can be read, and equals `expected`."""
    found = torch.zeros(1, dtype=torch.int64)
    try:
        _copy("read", process, address, found)
    except OSError:
        return False
    return int(found) == expected


_C = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _C.process_vm_readv.restype = ctypes.c_ssize_t
    _C.process_vm_writev.restype = ctypes.c_ssize_t
