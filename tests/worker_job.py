"""Jobs that are sent to a warm process, and its answers.

A function is sent by name, and its module by name and file. If pytest has loaded the module under another name, or the
module is a script that runs as `__main__`, the receiver loads the same file."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_exception
from types import ModuleType
from typing import Any

_MAIN = "__main__"


@dataclass(frozen=True)
class WorkerJob:
    """A call of an importable function; its arguments stay pickled until the function's module is there."""

    module: str
    qualname: str
    file: str | None
    arguments: bytes

    @classmethod
    def of(cls, main: Callable[..., Any], *, args: tuple[Any, ...]) -> WorkerJob:
        """Return the call `main(world, *args)`.

        Raises ValueError when another process could not import `main`, and what pickle raises for the arguments."""
        module, qualname = main.__module__, getattr(main, "__qualname__", "")
        file = getattr(sys.modules.get(module), "__file__", None)
        if not qualname or "<" in qualname or (module == _MAIN and file is None):
            raise ValueError(
                f"{qualname or repr(main)} of {module} cannot be imported by another process. Pass a function "
                "defined at the top of a file, with its inputs in args, or run it on threads"
            )
        return cls(module, qualname, file, pickle.dumps(args))

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def call(self, world: Any) -> Any:
        """Run it in this process."""
        main: Any = _load(self.module, self.file)
        for name in self.qualname.split("."):
            main = getattr(main, name)
        return main(world, *pickle.loads(self.arguments))


@dataclass(frozen=True)
class WorkerAnswer:
    """Result of a job on one rank: the pickled value, or the error with the text of its traceback."""

    result: bytes | None = None
    error: bytes | None = None
    traceback: str = ""

    @classmethod
    def by(cls, call: Callable[[], Any]) -> WorkerAnswer:
        """Run `call` and keep what it returns or raises."""
        try:
            return cls(result=pickle.dumps(call()))
        except Exception as error:  # noqa: BLE001 - whatever a job raises is its answer
            return cls.of(error)

    @classmethod
    def of(cls, error: Exception) -> WorkerAnswer:
        """Return the answer for an error."""
        return cls(error=_pickled(error), traceback="".join(format_exception(error)))

    def exception(self) -> Exception:
        """Return the error of a failed job, in the type it was raised with whenever that type can travel."""
        error = _unpickled(self.error) if self.error else None
        return error or RuntimeError(self.traceback.strip().rpartition("\n")[2])


def _load(name: str, file: str | None) -> ModuleType:
    """Return the module called `name`: as imported before, as Python finds it if that is the same file, or from the
    file."""
    if name in sys.modules and name != _MAIN:
        return sys.modules[name]
    if file is None or (name != _MAIN and _found(name) == file):
        return importlib.import_module(name)
    # As multiprocessing does it: its name for another process's __main__ is one that both sides understand.
    alias = "__mp_main__" if name == _MAIN else name
    if getattr(sys.modules.get(alias), "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(alias, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
    sys.modules[name] = sys.modules[alias]
    return sys.modules[alias]


def _found(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _pickled(error: Exception) -> bytes | None:
    """Return the error as bytes that are known to come back; some exceptions pickle and then do not."""
    try:
        data = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - an error that cannot travel is reported by its traceback
        return None
    return data if _unpickled(data) is not None else None


def _unpickled(data: bytes) -> Exception | None:
    try:
        error = pickle.loads(data)
    except Exception:  # noqa: BLE001 - as above
        return None
    return error if isinstance(error, Exception) else None
