"""Run two computations of a rank side by side: while a collective of one is under way, the other one computes.

They are two threads that compute in turns. A thread hands over just before it waits for a collective with a backward
(`autograd_collectives.py`). So the order of a rank's calls does not depend on times, and is the same on every rank."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

from meshwise.comm.api.flight_recorder import FlightRecorder
from meshwise.comm.api.streams import Streams


class OtherSideFailed(BaseException):
    """Raised in one of two computations when the other one has failed. Not an Exception: a model must not catch it."""


class SideBySide:
    """The two computations that a rank runs now, if it does: a forward, and the backward of an earlier micro-batch.

    | _both    True until one of the two has ended
    | _gates   of the forward (0) and of the backward (1): each waits at its own until the other one hands over"""

    def __init__(self, flight_recorder: FlightRecorder) -> None:
        self._flight_recorder = flight_recorder
        self._both = self._failed = False
        self._worker: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def running(
        self, backward: Callable[[], None], *, turn: AbstractContextManager[Any], streams: Streams
    ) -> Iterator[None]:
        """Call `backward()` in another thread while this thread runs the block, until both have ended.

        `turn`: context in which a thread of this rank computes; this thread is in it. Raises the exception of the first
        that fails; the other one ends where it next hands over."""
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="backward")
        self._turn, self._forward = turn, threading.get_ident()
        self._gates = threading.Semaphore(0), threading.Semaphore(0)
        self._both = True
        ended = self._worker.submit(self._run_backward, backward, streams, streams.current())
        try:
            yield
            self._let_end(ended)  # here, so that a KeyboardInterrupt in this wait ends the backward too
        except OtherSideFailed:
            pass  # the exception of the backward is raised below
        except BaseException:
            self._failed = True
            raise
        finally:
            self._let_end(ended)
            self._failed = False
        ended.result()

    def _let_end(self, backward: Future[None]) -> None:
        """Wait until the backward, which nothing runs beside any more, has ended."""
        self._both = False
        self._gates[1].release()
        self._turn.__exit__(None, None, None)
        wait([backward])
        self._turn.__enter__()

    def _run_backward(self, backward: Callable[[], None], streams: Streams, stream: Any) -> None:
        self._gates[1].acquire()
        try:
            if not self._failed:
                streams.select()
                with self._turn, streams.use(stream):
                    backward()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._both = False
            self._gates[0].release()

    def hand_over(self) -> None:
        """Let the other computation run until it hands over or ends; without another one, do nothing.

        Raises OtherSideFailed if the other one has failed."""
        if self._both:
            # A GPU's backward has a thread of its own, so only the forward's is known.
            side, doing = int(self._forward != threading.get_ident()), self._flight_recorder.doing
            self._turn.__exit__(None, None, None)
            self._gates[1 - side].release()
            self._gates[side].acquire()
            self._turn.__enter__()
            self._flight_recorder.doing = doing
        if self._failed:
            raise OtherSideFailed
