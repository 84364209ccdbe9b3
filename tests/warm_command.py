"""Start commands in processes that are forked from the server of the ranks, which has imported torch.

`python -m meshwise` takes seconds for its imports alone. A process that is started here has a session, a folder,
variables and streams of its own, too, and runs the same module or program as `__main__`. Tests of the start or of the
exit of Python itself use `subprocess`."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import connection, current_process, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from meshwise.comm.launch.fork_server import start_context


class WarmCommand:
    """A module that runs with some words, in the way of `subprocess.Popen`.

    module: as after `python -m`; `-c` runs the program in the next word. folder: by default this process's. variables:
    of its environment, besides those of this process."""

    def __init__(
        self, module: str, *words: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
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
                    "folder": str(folder or Path.cwd()),
                    "environment": os.environ | (variables or {}),
                },
            )
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Its status if it has ended."""
        return self.process.exitcode

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

    def end(self, timeout: float = 200.0) -> tuple[int, str, str]:
        """Its status, and the rest of what it printed on stdout and stderr."""
        try:
            out, err = self.communicate(timeout)
        except TimeoutError:
            self.kill()
            raise
        return self.wait(0), out, err

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
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # its own: what it leaves is told at its end
    atexit._clear()  # what the server has to do at its end
    interrupted = False
    try:
        if module == "-c":
            sys.argv = ["-c", *words[1:]]
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed as by Python; multiprocessing would do it another way
        sys.excepthook(type(error), error, error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):
            sys.exit(1)
        interrupted = True
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
    if interrupted:
        util._exit_function()  # type: ignore[attr-defined] # of multiprocessing itself
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
