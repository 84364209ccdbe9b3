"""`python limited.py ROOM JOB [flags]`: train a job in a process that may take ROOM bytes more than it has now."""

import resource
import sys
import threading
from pathlib import Path

import torch

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


if __name__ == "__main__":
    try:
        run_threads(1, main, args=(int(sys.argv[1]), sys.argv[2:]), timeout=None)
    except ShortageError as error:
        print(error)
        raise SystemExit(3) from None
