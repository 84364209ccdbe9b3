"""A thread that carries work out in the order it was given.

Daemon threads that are still inside torch when the interpreter exits end the process with "terminate called without an
active exception", whatever its exit status should be. So a worker is joined before that, by `close`.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class ThreadJob:
    """One job of a worker thread."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the job and keep its error for the waiting rank."""
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """True if the job is done."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the job is done; raises what the job raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class WorkerThread:
    """One thread, started with its first job."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def carry(self, job: Callable[[], None]) -> ThreadJob:
        """Do `job` after all earlier ones."""
        ticket = ThreadJob(job)
        self._jobs.put(ticket)
        return ticket

    def close(self) -> None:
        """Return when all jobs are done and the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            ticket.run()
