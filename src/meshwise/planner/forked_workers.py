"""Run functions at the same time in forked child processes that send their results back.

A rehearsal is some seconds of Python code, so threads do not help. Its inputs are a model and the user's functions,
which pickle may refuse. So a child is forked for each call, and shares the inputs with its parent."""

import gc
import multiprocessing
import signal
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch


@dataclass
class ForkedWorkers:
    """Pool of at most `count` forked children. With a count of 1, `finished` runs the work in this process."""

    count: int
    _running: dict[Any, tuple[Hashable, BaseProcess]] = field(default_factory=dict)
    _waiting: list[tuple[Hashable, Callable[[], Any]]] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """Number of started calls whose results `finished` has not returned yet."""
        return len(self._running) + len(self._waiting)

    @property
    def free(self) -> bool:
        """True if fewer than `count` calls are busy. `start` does not check it."""
        return self.busy < self.count

    def start(self, key: Hashable, *, work: Callable[[], Any]) -> None:
        """Start `work()` in a child; its result, which must be picklable, is returned by `finished` with `key`."""
        if self.count == 1:
            self._waiting.append((key, work))
            return
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, work), daemon=True)
        process.start()
        theirs.close()
        self._running[mine] = key, process

    def finished(self) -> list[tuple[Hashable, Any]]:
        """Wait for at least one started call, and return pairs (key, result) of all finished calls.

        A result is what `work` returned or the exception that it raised; ChildProcessError if the process died."""
        done = [(key, _outcome(work)) for key, work in self._waiting]
        self._waiting.clear()
        ready: list[Any] = list(wait(list(self._running))) if self._running else []
        for connection in ready:
            key, process = self._running.pop(connection)
            try:
                done.append((key, connection.recv()))
            except EOFError:
                process.join()
                done.append((key, ChildProcessError(f"a worker process ended with exit code {process.exitcode}")))
            process.join()
        return done

    def close(self) -> None:
        """Terminate all running children; their results are lost."""
        for _, process in self._running.values():
            process.terminate()
            process.join()
        self._running.clear()


def _child(connection: Connection, work: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends its children
    torch.set_num_threads(1)  # a fork has no threads of the parent, and kernels would wait for them
    gc.disable()  # garbage collection would take a third of the time and free little
    connection.send(_outcome(work))


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 -- the caller of `finished` gets it
        return error
