"""Start the processes of a team as forks of the server of the ranks, which has imported torch."""

import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any

import torch

import team
from meshwise.comm.launch.fork_server import start_context


class WarmContestant:
    """A process with the methods of `subprocess.Popen` that a team calls."""

    def __init__(self, process: ForkServerProcess | SpawnProcess, orders: Connection) -> None:
        self._process, self.pid, self.kill, self.wait = process, process.pid, process.kill, process.join
        self.stdin = os.fdopen(os.dup(orders.fileno()), "w", buffering=1)


def start(playing: Any, _python: str, environment: Mapping[str, str]) -> None:
    """`Team._start`, but for the interpreter."""
    (theirs, orders), (answers, writing) = connection.Pipe(duplex=False), connection.Pipe(duplex=False)
    with theirs, orders, answers, writing:
        process = start_context().Process(target=_main, args=(theirs, writing, dict(environment)))
        process.start()
        playing._processes.append(WarmContestant(process, orders))
        playing._answers.append(os.fdopen(os.dup(answers.fileno())))


def _main(orders: Connection, answers: Connection, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment, ANSWERS=str(os.dup(answers.fileno())))
    answers.close()
    sys.stdin = open(orders.fileno(), encoding="utf-8")  # noqa: SIM115, PTH123 - a number is no path
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    runpy.run_path(str(Path(team.__file__).with_name("contestant_process.py")), run_name="__main__")
