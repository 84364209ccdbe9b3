"""Run the ranks of tests as forked processes that share memory, instead of as threads.

    pytest --on processes
    pytest --on gpu          # as processes that share the GPU of this machine over gloo, kept between tests
    pytest --on accelerator  # as threads on simulated accelerators

Ranks have copies of their arguments and of the test's variables. So a test that reads variables which its ranks have
changed is marked to run on threads only. The output of ranks is printed by the test, and their errors are raised. If
the watchdog ended ranks, its report is raised."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without declaring it

from meshwise import testing
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.launch.connect import _worlds, connect
from meshwise.comm.network.job_store import LOOPBACK
from meshwise.comm.shared_memory.local_world import LocalWorld
from warm_processes import Processes
from worker_job import WorkerAnswer

_SECONDS = 120
_GRACE_SECONDS = 2.0
_MOST_ON_GPU = 20
"""Processes of one worker of pytest that may have memory of the GPU at once: the largest tests have 16 ranks."""
ON_GPU = "MESHWISE_TESTS_ON_GPU"
"""Variable that is set where ranks of tests share a GPU, in the ranks too."""


def install(*, on_gpu: bool = False) -> None:
    """From now on `meshwise.testing` has processes where it would have threads.

    on_gpu: the ranks share the first GPU of this machine, and `testing.alone` trains there too, in a process. From now
    on this process sees no GPU, so that what a test computes beside its ranks stays on the CPU. It is no parent of
    ranks: torch counts the GPUs in every backward, and after that forks cannot use them. Patches of a test do not reach
    its ranks."""
    if not on_gpu:
        replace_threads(run_forked)
        return
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the server that forks the ranks shall not count by CUDA
    ranks = _OnGpu()
    replace_threads(ranks)
    os.environ[ON_GPU] = "1"
    testing.alone = lambda *model, **training: ranks(1, _alone, args=(model, training))[0]


class _OnGpu:
    """Runner of ranks on the first GPU; their processes are kept, since each needs seconds to begin with CUDA."""

    def __init__(self) -> None:
        self._processes = Processes(device="cuda:0", most=_MOST_ON_GPU)
        self._cloudpickle = importlib.import_module("cloudpickle")  # not of `dev`; pickle takes no closures

    def __call__(self, size: int, main: Callable[..., Any], *, args: Sequence[Any] = ()) -> list[Any]:
        """Return what `main(world, *args)` returned, by rank, on the CPU. Raises the error of a rank that failed."""
        answers = self._processes.run(size, _call, args=(self._cloudpickle.dumps((main, args)),))
        return [pickle.loads(answer) for answer in answers]


def _call(world: World, job: bytes) -> bytes:
    main, args = pickle.loads(job)
    answer = io.BytesIO()
    _FromGpu(answer).dump(main(world, *args))
    return answer.getvalue()


class _FromGpu(pickle.Pickler):
    """Pickler of results for a process that sees no GPU: their tensors are on the CPU."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a tensor of a GPU from its copy on the CPU; leave other values to pickle."""
        return value.detach().cpu().__reduce_ex__(4) if isinstance(value, Tensor) and value.is_cuda else NotImplemented


def _alone(world: World, model: tuple[Any], training: dict[str, Any]) -> Any:
    if hasattr(model[0], "config"):  # transformers notes the outputs of a class when a process first builds one
        type(model[0])(model[0].config)
    return testing.alone(*model, **{"device": world.device} | training)


def replace_threads(runner: Callable[..., list[Any]]) -> None:
    """From now on `meshwise.testing` calls `runner` where it would start threads."""
    vars(testing)["run_threads"] = runner


def run_forked(size: int, main: Callable[..., Any], *, args: Sequence[Any] = ()) -> list[Any]:
    """`main(world, *args)` on `size` ranks; what each returned, by rank. Raises the error of one that failed."""
    # The store comes last: what a thread of it has locked at that moment would stay locked in a fork.
    with socket.socket() as listening, tempfile.TemporaryDirectory(prefix="meshwise-ranks-") as folder:
        listening.bind((LOOPBACK, 0))
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        ranks = [_Rank(rank, size, port, Path(folder), lambda world: main(world, *args)) for rank in range(size)]
        store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )
        try:
            _collect(ranks)
        finally:
            for rank in ranks:
                rank.end()
            del store
        for rank in ranks:
            sys.stdout.write(rank.printed("out"))
            sys.stderr.write(rank.printed("err"))
        errors = [error for rank in ranks if (error := rank.error()) is not None]
        if any(rank.answer is None for rank in ranks):
            errors.append(_ended(ranks))
        for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
            raise error
    return [rank.result() for rank in ranks]


def _collect(ranks: Sequence[_Rank]) -> None:
    """Wait for the answers. Once one has failed, those that do not come soon wait for it."""
    deadline = time.monotonic() + _SECONDS
    pending = {rank.pipe: rank for rank in ranks}
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            if any(rank.failed for rank in ranks):
                return
            raise _hung(list(pending.values()))
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError):
                rank.answer = pipe.recv()
            if rank.failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)


class _Rank:
    """One forked process, and the files that take what it prints."""

    def __init__(self, number: int, size: int, port: int, folder: Path, main: Callable[[World], Any]) -> None:
        self.number = number
        self.answer: WorkerAnswer | None = None
        self._folder = folder
        self.pipe, theirs = connection.Pipe(duplex=False)
        environment = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "MESHWISE_COMM": "local",
        }
        with theirs, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # from Python 3.12 on
            self.process = get_context("fork").Process(target=self._live, args=(theirs, environment, main))
            self.process.start()

    def printed(self, stream: str) -> str:
        """What it wrote there."""
        path = self._path(stream)
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def failed(self) -> bool:
        """Whether it has answered with an error."""
        return self.answer is not None and self.answer.result is None

    def error(self) -> Exception | None:
        """What it raised."""
        if self.answer is None or self.answer.result is not None:
            return None
        error = self.answer.exception()
        error.add_note(f"on rank {self.number}, forked:\n{self.answer.traceback}")
        return error

    def result(self) -> Any:
        """What it returned."""
        assert self.answer is not None
        assert self.answer.result is not None
        return pickle.loads(self.answer.result)

    def end(self) -> None:
        """End it. One that has returned a result closes its world first."""
        if self.answer is not None and not self.failed:
            self.process.join(_GRACE_SECONDS)
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _path(self, stream: str) -> Path:
        return self._folder / f"{self.number}.{stream}"

    # ---- in the process ----------------------------------------------------------------------------------------

    def _live(self, pipe: connection.Connection, environment: dict[str, Any], main: Callable[[World], Any]) -> None:
        os.setsid()
        sys.stdout, sys.stderr = self._stream("out", 1), self._stream("err", 2)
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        os.environ.update({name: str(value) for name, value in environment.items()})
        _worlds.cache_clear()  # those of the process that was forked
        world = connect(device=torch.device("cpu"))
        assert world.size == 1 or isinstance(world, LocalWorld), "ranks of a host share its memory"
        answer = WorkerAnswer.by(lambda: main(world))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(answer)
        if answer.result is None:
            signal.pause()  # others may wait for this rank: it is ended with them
        world.close()
        os._exit(0)

    def _stream(self, name: str, number: int) -> IO[str]:
        file = self._path(name).open("a", buffering=1)
        os.dup2(file.fileno(), number)
        return file


def _ended(ranks: Sequence[_Rank]) -> Exception:
    """What is to be raised of ranks that ended without an answer: what the watch said."""
    said = "\n".join(f"rank {rank.number}, {rank.process.exitcode}:\n{rank.printed('err')}" for rank in ranks)
    return RanksDisagree(said) if "different collectives" in said else RuntimeError(f"ranks ended:\n{said}")


def _hung(ranks: Sequence[_Rank]) -> TimeoutError:
    for rank in ranks:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(_GRACE_SECONDS)
    said = "\n".join(f"rank {rank.number}:\n{rank.printed('err')}" for rank in ranks)
    return TimeoutError(f"no answer in {_SECONDS} s:\n{said}")
