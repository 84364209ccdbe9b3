"""Messages to a process and back: functions by name, results and errors by pickle."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from worker_job import WorkerAnswer, WorkerJob


class Odd(Exception):
    """Pickles, and cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def double(world: Any, number: int) -> int:
    return 2 * number


def fail_oddly() -> None:
    raise Odd(1, 2)


def fail_plainly() -> None:
    raise KeyError("no such key")


def test_a_job_calls_the_function_with_the_world_and_the_arguments() -> None:
    job = WorkerJob.of(double, args=(21,))
    assert str(job) == f"{__name__}:double"
    assert job.call(None) == 42


def test_a_module_that_is_not_importable_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "far_away.py"
    file.write_text("def main(world):\n    return __file__\n")
    spec = importlib.util.spec_from_file_location("far.away", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["far.away"] = module
    try:
        spec.loader.exec_module(module)
        job = WorkerJob.of(module.main, args=())
        del sys.modules["far.away"]
        assert job.call(None) == str(file)
    finally:
        sys.modules.pop("far.away", None)


def test_an_error_keeps_its_type() -> None:
    answer = WorkerAnswer.by(fail_plainly)
    assert answer.result is None
    assert isinstance(answer.exception(), KeyError)
    assert "in fail_plainly" in answer.traceback


def test_an_error_that_cannot_be_pickled_arrives_as_text() -> None:
    error = WorkerAnswer.by(fail_oddly).exception()
    assert type(error) is RuntimeError
    assert str(error).endswith("Odd: 1 and 2")


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    answer = WorkerAnswer.by(lambda: fail_oddly.__code__)
    assert answer.result is None
    assert "code" in str(answer.exception())
