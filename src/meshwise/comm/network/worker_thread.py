"""A thread that runs jobs one after the other, in the order in which they were given.

Call `close` before the interpreter exits: it joins the thread. A daemon thread still inside torch would end the process
with "terminate called without an active exception" and a wrong exit status.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class ThreadJob(Future[None]):
    """One job of a worker thread, to wait for."""

    def wait(self) -> None:
        """Block until the job has ended. Raises the exception of the job."""
        self.result()


class WorkerThread:
    """Daemon thread for jobs; it starts when the object is made."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[ThreadJob, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> ThreadJob:
        """Run `job` after all earlier jobs; return an object to wait for."""
        ticket = ThreadJob()
        self._jobs.put((ticket, job))
        return ticket

    def close(self) -> None:
        """Block until all jobs are done and the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            ticket, job = entry
            try:
                job()
                ticket.set_result(None)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it in another thread
                ticket.set_exception(error)
