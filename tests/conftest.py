"""Settings of all tests: one thread per process, fixed seeds and hypothesis examples, CUDA tests only with CUDA.

Real processes are started once and reused."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
# To ask the driver for GPUs another way would use CUDA here, and ranks that are forked could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# For the processes that tests start: what is freed from 1 MB up goes back to the system at once, instead of making the
# next thing that is measured look larger or smaller.
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
# Each of them has hashes of its own, so that nothing which ranks have to agree on follows the order of a set.
os.environ.pop("PYTHONHASHSEED", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

import run_on_processes
from accelerator.simulated_accelerators import SimulatedAccelerators
from grid import name
from warm_processes import Processes

torch.set_num_threads(1)
# What is printed is as wide and as plain as where nobody has said a word about it.
for _said in ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_said, None)
# A step of many ranks in threads makes thousands of objects that live until it is over: to look for garbage after every
# 700 of them was a tenth of the processor time of those tests.
gc.set_threshold(10_000)
# A shell that starts the suite in the background has Ctrl-C ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no deadline: on a busy machine a slow example says nothing about the code.
settings.register_profile(
    "meshwise",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("meshwise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-grids", action="store_true", help="every cell of the grids, not only a part")
    parser.addoption(
        "--on",
        choices=("threads", "processes", "accelerator", "gpu"),
        default="threads",
        help="what runs ranks where a test names nothing: threads, forked processes that share memory, simulated "
        "accelerators, or processes that share the GPU of this machine over gloo",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("grid")
    if marker:
        (grid,) = marker.args
        cells = grid.whole() if metafunc.config.getoption("--whole-grids") else grid.part()
        metafunc.parametrize(list(grid.axes), [list(cell.values()) for cell in cells], ids=map(name, cells))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on") == "gpu":
        found = Path("/dev/nvidia0").exists()  # not by torch: see `run_on_processes.install`
        for item in items:
            if not found:
                item.add_marker(pytest.mark.skip(reason="--on gpu needs a CUDA device, and there is no /dev/nvidia0"))
            elif isinstance(item, pytest.Function) and "monkeypatch" in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason="patches of this process do not reach ranks on a GPU"))
    if config.getoption("--on") != "threads":
        for item in items:
            marker = item.get_closest_marker("threads")
            if marker and (config.getoption("--on") == "processes" or not marker.kwargs.get("or_gpus")):
                item.add_marker(pytest.mark.skip(reason=f"of threads alone: {marker.args[0]}"))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    items[:] = _files_that_wait_among_others(items)


def _files_that_wait_among_others(items: list[pytest.Item]) -> list[pytest.Item]:
    """Spread the files with tests that wait for processes evenly over the run: by name they would come first, all at
    once with nothing to compute, and then every worker would compute on few cores."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting, computing = list[list[pytest.Item]](), list[list[pytest.Item]]()
    for tests in files.values():
        waits = any(item.get_closest_marker("processes") for item in tests)
        (waiting if waits else computing).append(tests)
    places = {id(tests): number / len(kind) for kind in (waiting, computing) for number, tests in enumerate(kind)}
    return [item for tests in sorted(files.values(), key=lambda tests: places[id(tests)]) for item in tests]


class ShownAtOnce:
    """Print each failure when it happens: on a lent GPU a run may be ended before its summary."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sys.stderr.write(f"\n{report.nodeid}\n{report.longreprtext}\n")


class Imported:
    """What has been imported stays: no collection of garbage need look at it again. Else one of the oldest generation
    takes a fifth of a second once the models of transformers are there, and they were 7 % of the whole suite."""

    def __init__(self) -> None:
        self._modules = 0

    def pytest_collection_finish(self) -> None:
        importlib.import_module("torch._dynamo")  # an optimizer does so
        self._settle()

    def pytest_runtest_logfinish(self) -> None:
        if len(sys.modules) > self._modules + 20:
            self._settle()

    def _settle(self) -> None:
        self._modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Imported())
    on = config.getoption("--on")
    if on == "gpu" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ShownAtOnce())
    if on in ("processes", "gpu"):
        run_on_processes.install(on_gpu=on == "gpu")
    if on == "accelerator":
        run_on_processes.replace_threads(SimulatedAccelerators().run)


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs keep their text there: in a home, if there is one, it would stay."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _the_same_start() -> Iterator[None]:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:  # no fixture: `monkeypatch` tells that a test itself patches
        patched.setenv("COLUMNS", "80")  # whatever terminal the suite is started from
        for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONIOENCODING"):
            patched.delenv(variable, raising=False)
        patched.setattr(sys, "path", [*sys.path])  # a job's own folder is put on it, and processes inherit it
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Real gloo processes, kept warm for the whole session: `run(4, main, on=processes)`."""
    with Processes(timeout=200) as warm:
        yield warm
