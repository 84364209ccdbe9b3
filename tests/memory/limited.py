"""`python limited.py ROOM JOB`: for each plan on a line of the input, train the job in a process that may take ROOM
bytes more than this one, and say how that ended.

The processes are forked from this one, which has imported everything once.
"""

import os
import resource
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch._dynamo

from meshwise.cli import train as command
from meshwise.comm import World, run_threads
from meshwise.simulate.shortage import ShortageError
from meshwise.train.config import read_job
from meshwise.train.job import Job


def taken() -> int:
    """Bytes that count for the limit."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmData"].split()[0]) * 1024


def main(world: World, room: int, words: list[str]) -> None:
    threading.stack_size(1 << 18)  # 8 MiB each would count, whatever of them is used
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    resource.setrlimit(resource.RLIMIT_DATA, (taken() + room, resource.RLIM_INFINITY))
    command._rank(world, read_job(words, prog="limited", kind=Job))


def forked(room: int, words: list[str]) -> int:
    """The status with which a process ends that trains."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        run_threads(1, main, args=(room, words), timeout=None)
        status = 0
    except ShortageError as error:
        print(error)
        status = 3
    finally:
        if status == 1:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(f"ended {forked(int(sys.argv[1]), [sys.argv[2], '--plan', line.strip()])}", flush=True)
