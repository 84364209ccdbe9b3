"""`python limited_memory.py ROOM JOB`: train a job under each plan on a line of the input, with ROOM bytes of memory.

Each training is a process that may take ROOM bytes more than this one; its end is printed. A line `script PLAN` trains
without a job, as a user's own script does, and `needs PLAN` prints what the plan needs.

The processes are forked from this one, which has imported everything once."""

import os
import resource
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch._dynamo
from torch import Tensor, nn

import meshwise as mw
from meshwise.cli import train_command as command
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.memory.swap_file import SwapConfig
from meshwise.simulate.predicted_memory import ShortageError
from meshwise.train.flags_and_toml import read_job
from meshwise.train.job_settings import Job

SMALL = mw.Options(swap=SwapConfig(buffer=1 << 22))


def taken() -> int:
    """Bytes that count for the limit."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmData"].split()[0]) * 1024


def limit(room: int) -> None:
    """From here on, take no more than so many bytes."""
    threading.stack_size(1 << 18)  # 8 MiB each would count, whatever of them is used
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    resource.setrlimit(resource.RLIMIT_DATA, (taken() + room, resource.RLIM_INFINITY))


def job(world: World, words: list[str]) -> None:
    """`meshwise train`."""
    command._rank(world, read_job(words, prog="limited", kind=Job))


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])


def script(world: World, words: list[str]) -> None:
    """What somebody writes."""
    trainer = mw.parallelize(layers, words[1], loss=squares, world=world, options=SMALL)
    trainer.step(torch.ones(8, 1024))
    trainer.step(torch.ones(8, 1024))


def needs(_: World, words: list[str]) -> None:
    """Print what the note of the error says to print."""
    print(mw.needs(layers, words[1], loss=squares, batch=torch.ones(8, 1024), options=SMALL))


def forked(room: int, words: list[str]) -> int:
    """The status with which a process ends that trains."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        limit(room)
        run_threads(1, {"script": script, "needs": needs}.get(words[0], job), args=(words,), timeout=None)
        status = 0
    except ShortageError as error:
        print(error)
        status = 3
    finally:
        if status == 1:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        asked = line.strip()
        named = asked.split(" ", 1) if asked.startswith(("script ", "needs ")) else [sys.argv[2], "--plan", asked]
        print(f"ended {forked(int(sys.argv[1]), named)}", flush=True)
