"""One warm process: joins its world, then runs the jobs it is sent until it is told to stop.

Started by `processes` as `python -m meshwise.testing.worker FD`, with the variables of a torchrun rank.
A thread reads the pipe, so that a rank which is blocked in a collective still notices that whoever started it is gone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from meshwise.comm.launch import connect
from meshwise.testing.job import Answer, Job


def _receive(connection: Connection, jobs: SimpleQueue[Job | None]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def _work(connection: Connection) -> None:
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    world = connect(device=torch.device("cpu"))
    while (job := jobs.get()) is not None:
        torch.manual_seed(0)
        answer = Answer.by(partial(job.call, world))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)
    world.close()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    _work(Connection(int(sys.argv[1])))
