"""Start commands in processes that are forked from the server of the ranks, which has imported torch.

`python -m meshwise` takes seconds for its imports alone. What is started here has a session, a folder, variables and
streams of its own, too, and runs the same module as `__main__`. Where the start itself or the exit of Python is what a
test is about, it uses `subprocess`."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import connection, current_process
from multiprocessing.connection import Connection
from pathlib import Path

from meshwise.comm.launch.fork_server import start_context


class WarmCommand:
    """A module that runs with some words, in the way of `subprocess.Popen`.

    module: as after `python -m`. variables: of its environment, besides those of this process."""

    def __init__(self, module: str, *words: str, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.NamedTemporaryFile(prefix="errors-")  # noqa: SIM115 - closed by `communicate`
        ours, theirs = connection.Pipe(duplex=False)
        with ours, theirs:
            self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
            self.process = start_context().Process(
                target=_main,
                args=(module, *words),
                kwargs={
                    "output": theirs,
                    "errors": self._errors.name,
                    "folder": str(folder),
                    "environment": os.environ | (variables or {}),
                },
            )
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait(self, timeout: float) -> int:
        """Its status, as of `subprocess`: below 0 that of a signal. Raises TimeoutError if it has not ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; the rest of what it printed on stdout, and what it printed on stderr."""
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self.stdout.read()), daemon=True)
        reader.start()
        self.wait(timeout)
        reader.join(timeout)
        if not found:
            raise TimeoutError(f"a process of {self.pid} has kept its stdout for {timeout:g} s")
        self.stdout.close()
        with self._errors:
            return found[0], Path(self._errors.name).read_text(encoding="utf-8")

    def kill(self) -> None:
        """End the process if it runs, and forget its streams."""
        self.process.kill()
        self.process.join()
        self.stdout.close()
        self._errors.close()


def _main(
    module: str, *words: str, output: Connection, errors: str, folder: str, environment: Mapping[str, str]
) -> None:
    os.setsid()
    os.dup2(output.fileno(), 1)
    output.close()
    with open(errors, "ab", buffering=0) as file:  # noqa: PTH123 - a path travels as text
        os.dup2(file.fileno(), 2)
    # Those of the server may be files, which know their place.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as at the start of Python
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the suite was started by nohup
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the server blocks Ctrl-C
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, "")  # as `python -m` has it
    tempfile.tempdir = None  # as the variables say
    current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined] # of multiprocessing itself
    sys.modules.pop("__mp_main__", None)  # the program of the one who started us
    sys.argv = [module, *words]
    atexit._clear()  # what the server has to do at its end
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
