"""Main loop of a warm process: it joins a world, then runs jobs until it is stopped.

`warm_processes` forks it from a server that has imported this module. A thread reads the pipe, so a rank that is
blocked in a collective still notices that its parent has ended."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from meshwise.comm.launch.connect import connect
from worker_job import WorkerAnswer, WorkerJob


def _receive(connection: Connection, jobs: SimpleQueue[WorkerJob | None]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def _work(connection: Connection, device: str) -> None:
    jobs: SimpleQueue[WorkerJob | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    world = connect(device=torch.device(device))
    while (job := jobs.get()) is not None:
        torch.manual_seed(0)
        answer = WorkerAnswer.by(partial(job.call, world))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)
    world.close()


def main(connection: Connection, *, log: str, environment: Mapping[str, str], device: str) -> None:
    """Run one rank from start to end. `log`: the file for its output; `environment`: the variables of a torchrun
    rank."""
    os.setsid()  # Ctrl-C is for the one who started us; it ends the crew
    with open(log, "ab", buffering=0) as file:  # noqa: PTH123 - a path travels as text
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, "")  # as `python -m` has it
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    atexit._clear()  # what the server has to do at its end
    _work(connection, device)
    atexit._run_exitfuncs()  # a forked process ends without
