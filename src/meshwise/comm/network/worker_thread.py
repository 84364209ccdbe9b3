"""A thread that runs jobs one after the other, in the order in which they were given.

`close` joins the thread before the interpreter exits. A daemon thread that is still inside torch then would end the
process with "terminate called without an active exception" and a wrong exit status.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class ThreadJob:
    """One job of a worker thread, to wait for."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the job in the calling thread, and store its exception for `wait`."""
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in another thread
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """True if the job has ended, with or without an exception."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the job has ended. Raises the exception of the job."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class WorkerThread:
    """Daemon thread for jobs; it starts when the object is made."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> ThreadJob:
        """Run `job` after all earlier jobs; return an object to wait for."""
        ticket = ThreadJob(job)
        self._jobs.put(ticket)
        return ticket

    def close(self) -> None:
        """Block until all jobs are done and the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            ticket.run()
