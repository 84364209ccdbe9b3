"""A contestant as its processes: one per rank, started here, kept alive, and idle until it is their turn."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from contestants import Contestant
from gpt import Shape
from meshwise.comm.network.job_store import LOOPBACK, loopback_store

_ANSWER_SECONDS = 300.0


class ContestantFailed(RuntimeError):
    """A contestant did not start or stopped answering; the message ends with what it wrote to stderr."""


@dataclass(frozen=True)
class Turn:
    """Consecutive steps of one contestant: wall seconds per step, processor seconds of all ranks together per step, the
    losses, and each rank's peak memory in 10^6 bytes."""

    seconds: float
    processor_seconds: float
    losses: tuple[float, ...]
    megabytes: tuple[float, ...]


class Team:
    """The processes of one contestant. Use as a context manager: leaving it ends them."""

    def __init__(self, contestant: Contestant, *, python: str, shape: Shape, ranks: int, threads: int = 1) -> None:
        self.contestant = contestant
        self.ranks = ranks
        self._answers: list[IO[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self._store = loopback_store()  # where they meet: a port that is only found free may be taken by the time
        setting = {
            "contestant": contestant.name,
            "module": contestant.module,
            "shape": dataclasses.asdict(shape),
            "threads": threads,
        }
        common = {
            **os.environ,
            "SETTING": json.dumps(setting),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
        }
        for rank in range(ranks):
            self._start(python, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _start(self, python: str, environment: dict[str, str]) -> None:
        reading, writing = os.pipe()
        self._processes.append(
            subprocess.Popen(
                [python, str(Path(__file__).with_name("contestant_process.py"))],
                env={**environment, "ANSWERS": str(writing)},
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=(writing,),
                text=True,
                bufsize=1,
            )
        )
        os.close(writing)
        self._answers.append(os.fdopen(reading))

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for answers in self._answers:
            answers.close()
        self._stderr.close()

    def wait_until_ready(self) -> None:
        """Return when every rank has built its model."""
        self._read()

    def reset_peak(self) -> None:
        """Start the measurement of peak memory here."""
        self._order({"do": "reset_peak"})

    def turn(self, *, steps: int) -> Turn:
        """Train `steps` steps on all ranks while everyone else is idle."""
        before = self.cpu_seconds()
        answers = self._order({"do": "steps", "steps": steps})
        processor_seconds = self.cpu_seconds() - before
        seconds = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
        by_step = zip(*(answer["losses"] for answer in answers), strict=True)
        return Turn(
            seconds=seconds / steps,
            processor_seconds=processor_seconds / steps,
            losses=tuple(statistics.fmean(loss for loss in losses if loss is not None) for losses in by_step),
            megabytes=tuple(answer["peak"] for answer in answers),
        )

    def counts(self) -> tuple[int, int]:
        """Python calls and torch operations of one step on rank 0; two more steps are trained for it."""
        first = self._order({"do": "count"})[0]
        return first["calls"], first["operations"]

    def cpu_seconds(self) -> float:
        """Processor time used so far by all ranks and all their threads (Linux; 0 elsewhere)."""
        stats = [Path(f"/proc/{process.pid}/stat") for process in self._processes]
        if not all(stat.exists() for stat in stats):
            return 0.0
        fields = [stat.read_text().rpartition(")")[2].split() for stat in stats]
        return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")

    def _order(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
        return self._read()

    def _read(self) -> list[dict[str, Any]]:
        """One answer of each rank. A rank that ends is noticed at once, though the others may wait for it for ever."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._answers):
            waiting = {stream: rank for rank, stream in enumerate(self._answers) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], _ANSWER_SECONDS)
            for stream in ready:
                if line := stream.readline():
                    answers[waiting[stream]] = json.loads(line)
                    continue
                raise ContestantFailed(f"{self.contestant.name}: rank {waiting[stream]} ended\n{self._last_words()}")
            if not ready:
                raise ContestantFailed(f"{self.contestant.name}: no answer within {_ANSWER_SECONDS:g} s")
        return [answers[rank] for rank in sorted(answers)]

    def _last_words(self) -> str:
        self._stderr.flush()
        self._stderr.seek(0)
        return "".join(self._stderr.readlines()[-25:])
