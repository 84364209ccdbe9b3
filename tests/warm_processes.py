"""Keep real processes that gloo joins alive between tests, so that a test does not pay for their start.

Four processes that import torch and join take seconds; a job sent to joined processes takes milliseconds. torch is
imported once, by the server from which multiprocessing forks the processes.

    Processes ── crew of 2 ── rank 0, rank 1               a pipe sends a job to every rank of a crew,
              └─ crew of 4 ── rank 0, rank 1, …            and each rank sends back an answer

A crew is discarded when a job fails or hangs: its ranks may be anywhere inside a collective. The next job of this size
starts a new crew."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection, util
from types import TracebackType
from typing import Any

import warm_worker as worker
from meshwise.comm.launch.fork_server import start_context
from meshwise.comm.network.job_store import LOOPBACK, loopback_store
from worker_job import WorkerAnswer, WorkerJob

_GRACE_SECONDS = 1.0
_LOG_BYTES = 8192


class Processes:
    """Crews of processes, one for each world size in use. Close it, or use it as a context manager.

    timeout: seconds a job may take on the slowest rank, the start of the processes included when it is the first.
    device: of every rank. most: number of processes that may live at once, each with memory of its device; the crews
    whose last job is longest ago end first."""

    def __init__(self, *, timeout: float = 120.0, device: str = "cpu", most: int | None = None) -> None:
        self.timeout = timeout
        self._device = device
        self._most = most
        self._crews: dict[int, _Crew] = {}
        # At exit, before multiprocessing waits for them.
        util.Finalize(self, _close, args=(self._crews,), exitpriority=0)

    def run(self, size: int, main: Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """`main(world, *args)` on `size` ranks; what each returned, by rank. `main` is a function at the top of a file.

        Raises the error of the first rank that failed, with that rank's traceback and output as a note. Raises
        RuntimeError when a rank ended, and TimeoutError, with the Python stack of every rank that had not answered.
        ValueError when `main` cannot be imported by another process."""
        job = WorkerJob.of(main, args=args)
        crew = self._crew(size)
        try:
            return crew.run(job, self.timeout)
        except BaseException:
            self._crews.pop(size).kill()
            raise

    def _crew(self, size: int) -> _Crew:
        crew = self._crews.pop(size, None)
        if crew is None:
            while self._most is not None and self._crews and sum(self._crews) + size > self._most:
                self._crews.pop(next(iter(self._crews))).close()
            crew = _Crew(size, self._device)
        self._crews[size] = crew  # as the last one
        return crew

    def close(self) -> None:
        """Ask all processes to end, and end those that do not. Safe to call twice; `run` starts new ones."""
        _close(self._crews)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _close(crews: dict[int, _Crew]) -> None:
    while crews:
        crews.popitem()[1].close()


class _Crew:
    """The ranks of one world."""

    def __init__(self, size: int, device: str) -> None:
        self._store = loopback_store()  # here from the start: a port that is only found free may be taken by the time
        self._ranks: list[_Rank] = []
        try:
            for rank in range(size):
                self._ranks.append(_Rank(rank, size, self._store.port, device))
        except BaseException:
            self.kill()
            raise

    def run(self, job: WorkerJob, timeout: float) -> list[Any]:
        for rank in self._ranks:
            rank.send(job)
        answers: dict[int, WorkerAnswer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._ranks):
            pending = {rank.pipe: rank for rank in self._ranks if rank.number not in answers}
            ready = set(connection.wait(list(pending), max(0.0, deadline - time.monotonic())))
            if not ready:
                raise self._hung(job, list(pending.values()), timeout)
            for rank in (rank for pipe, rank in pending.items() if pipe in ready):
                answers[rank.number] = self._answer(job, rank)
        for rank in self._ranks:
            sys.stdout.write(rank.output())
        return [pickle.loads(answers[rank.number].result or b"") for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.send(None)
        deadline = time.monotonic() + 5 * _GRACE_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
            rank.log.close()

    def _answer(self, job: WorkerJob, rank: _Rank) -> WorkerAnswer:
        """Return the answer of a rank that has sent one or has ended. Raises what went wrong there."""
        try:
            answer = rank.pipe.recv()
        except (EOFError, OSError):
            raise self._ended(job, rank) from None
        assert isinstance(answer, WorkerAnswer)
        if answer.result is None:
            error = answer.exception()
            error.add_note(f"on rank {rank.number} of {len(self._ranks)} processes, in {job}:\n{answer.traceback}")
            _add_outputs(error, [rank])
            raise error
        return answer

    def _ended(self, job: WorkerJob, rank: _Rank) -> RuntimeError:
        # The ranks that waited for this one may be about to say so; their words belong in the report.
        time.sleep(_GRACE_SECONDS)
        rank.process.join()
        status = rank.process.exitcode or 0
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        error = RuntimeError(f"rank {rank.number} of {len(self._ranks)} processes ended {how} in {job}")
        _add_outputs(error, self._ranks)
        return error

    def _hung(self, job: WorkerJob, ranks: list[_Rank], timeout: float) -> TimeoutError:
        for rank in ranks:
            rank.signal(signal.SIGUSR1)
        time.sleep(_GRACE_SECONDS)
        who = ", ".join(str(rank.number) for rank in ranks)
        error = TimeoutError(f"no answer in {timeout:g} s from rank {who} of {len(self._ranks)} processes to {job}")
        _add_outputs(error, ranks)
        return error


class _Rank:
    """One process of a crew, its pipe, and the file that takes what it prints."""

    def __init__(self, number: int, size: int, port: int, device: str) -> None:
        self.number = number
        self.log = tempfile.NamedTemporaryFile(prefix="meshwise-")  # noqa: SIM115 - closed with the rank
        self._read = 0
        self.pipe, theirs = connection.Pipe()
        with theirs:
            self.process = start_context().Process(
                target=worker.main,
                args=(theirs,),
                kwargs={
                    "log": self.log.name,
                    "environment": _environment(number, size, port),
                    "device": device,
                },
            )
            self.process.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def send(self, job: WorkerJob | None) -> None:
        # A process that has ended cannot take a job; that it ended is found, and said, when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(job)

    def output(self) -> str:
        """Return the output of the rank since the last call; only its end when it is long."""
        start, self._read = self._read, os.fstat(self.log.fileno()).st_size
        start = max(start, self._read - _LOG_BYTES)
        return os.pread(self.log.fileno(), self._read - start, start).decode(errors="replace")


def _add_outputs(error: Exception, ranks: list[_Rank]) -> None:
    for rank in ranks:
        if text := rank.output().strip():
            error.add_note(f"rank {rank.number} printed:\n{text}")


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of a torchrun rank, one thread each, and the modules that this process can import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return (
        kept
        | {name: str(number) for name, number in numbers.items()}
        | {
            "MASTER_ADDR": LOOPBACK,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
    )
