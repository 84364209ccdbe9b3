"""Run work in forked children, which share the memory of their parent.

A rehearsal is seconds of Python, so threads do not help. Its inputs, a model and the user's functions, cannot be sent
to a fresh process. So a child is forked for each, and sends its result back.
"""

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
    """At most `count` children at a time; with a count of one, this process does the work."""

    count: int
    _running: dict[Any, tuple[Hashable, BaseProcess]] = field(default_factory=dict)
    _waiting: list[tuple[Hashable, Callable[[], Any]]] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """Number of started pieces of work whose results were not returned yet."""
        return len(self._running) + len(self._waiting)

    @property
    def free(self) -> bool:
        """True if another piece can be started."""
        return self.busy < self.count

    def start(self, key: Hashable, *, work: Callable[[], Any]) -> None:
        """Begin a piece of work; what it returns has to be a value that can be pickled."""
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
        """Return finished work as (key, result or raised exception), waiting until there is some."""
        done = [(key, _outcome(work)) for key, work in self._waiting]
        self._waiting.clear()
        ready: list[Any] = list(wait(list(self._running))) if self._running else []
        for connection in ready:
            key, process = self._running.pop(connection)
            try:
                done.append((key, connection.recv()))
            except EOFError:
                process.join()
                done.append((key, ChildProcessError(f"a child of the search ended with status {process.exitcode}")))
            process.join()
        return done

    def close(self) -> None:
        """End the children whose results are no longer needed."""
        for _, process in self._running.values():
            process.terminate()
            process.join()
        self._running.clear()


def _child(connection: Connection, work: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the search, which ends its children
    torch.set_num_threads(1)  # the parent's threads are gone in a fork, and kernels would wait for them
    gc.disable()  # garbage collection takes a third of the time, and finds little
    connection.send(_outcome(work))


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 -- handed to whoever asked for the work
        return error
