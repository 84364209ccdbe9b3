"""Test systems that lack a feature of this one: the feature is replaced, or messages are used with a warning."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from joined_worlds import joined
from meshwise.comm.api.launcher_info import has_ended
from meshwise.comm.api.world import World
from meshwise.comm.launch.fork_server import start_context
from meshwise.comm.network.choose_world import process_world
from meshwise.comm.network.gloo_world import GlooWorld
from meshwise.comm.network.job_store import job_store
from meshwise.comm.shared_memory.host_connection import Board
from meshwise.testing import run
from warm_processes import Processes

SIZE = 4
FILES = 1100


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, `os` has none of these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(os, name, raising=False)
        yield


def sums(world: World) -> None:
    """What travels with the call, what is read where it lies, and a rank that is waited for so long that its life is
    asked for."""
    for length in (5, 100_003):
        for x in (torch.empty(length), world.empty(length, dtype=torch.float32)):
            for turn in range(3):
                x.copy_(torch.arange(length) % 7 + world.rank)
                world.all_reduce(x, axes="rank").wait()
                assert x.equal(4.0 * (torch.arange(length) % 7) + 6), (length, turn)
    if world.rank == 0:
        time.sleep(0.1)
    world.barrier()


def by_an_old_python(world: World, name: str) -> None:
    with without("memfd_create"):
        other = joined(world, name, "shared memory")
        sums(other)
        other.close()


def by_another_processor(world: World, name: str) -> int:
    """One that moves writes past writes, and whose system sleeps otherwise."""
    with (
        mock.patch.multiple("meshwise.comm.shared_memory.host_connection", _KEEPS_ORDER=False, _FUTEX=None),
        mock.patch.object(Board, "_order", autospec=True, side_effect=Board._order) as order,
    ):
        other = joined(world, name, "shared memory")
        sums(other)
        other.close()
    return order.call_count


def with_many_files(world: World, name: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FILES), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
    try:
        other = joined(world, name, "shared memory")
        sums(other)
        other.close()
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def on_macos(world: World, name: str) -> str:
    found = job_store()
    assert found is not None
    with (
        mock.patch.object(sys, "platform", "darwin"),
        without("memfd_create", "sched_getaffinity"),
        mock.patch("sys.stderr") as stderr,
    ):
        other = process_world(world.device, store=PrefixStore(name, found))
        assert isinstance(other, GlooWorld)
        sums(other)
        other.close()
    return "".join(call.args[0] for call in stderr.write.call_args_list)


def with_small_files(world: World, name: str) -> str:
    return limited(world, name, resource.RLIMIT_FSIZE, 1 << 16)


def with_few_addresses(world: World, name: str) -> str:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limited(world, name, resource.RLIMIT_AS, taken + (1 << 29))


def limited(world: World, name: str, what: int, most: int) -> str:
    """What is told of ranks that join and call where the system gives each of them no more."""
    found = job_store()
    assert found is not None
    had = resource.getrlimit(what)
    resource.setrlimit(what, (most, had[1]))
    try:
        with mock.patch("sys.stderr") as stderr:
            other = process_world(world.device, store=PrefixStore(name, found))
            sums(other)
            other.close()
    finally:
        resource.setrlimit(what, had)
    return "".join(call.args[0] for call in stderr.write.call_args_list)


@pytest.mark.processes
def test_where_addresses_are_limited_the_remedy_is_to_have_more(processes: Processes) -> None:
    told, *_ = run(SIZE, with_few_addresses, on=processes, args=(uuid.uuid4().hex,))
    assert "Cannot allocate memory" in told
    assert "allow processes more address space (`ulimit -v unlimited`), or set MESHWISE_COMM=gloo" in told


@pytest.mark.processes
def test_memory_is_shared_by_a_python_that_knows_only_old_systems(processes: Processes) -> None:
    run(SIZE, by_an_old_python, on=processes, args=(uuid.uuid4().hex,))


@pytest.mark.processes
def test_order_is_kept_where_the_processor_does_not(processes: Processes) -> None:
    assert min(run(SIZE, by_another_processor, on=processes, args=(uuid.uuid4().hex,))) > 0


@pytest.mark.processes
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * FILES, reason="so many files cannot be open")
def test_ranks_that_have_many_files_open_share_memory(processes: Processes) -> None:
    run(SIZE, with_many_files, on=processes, args=(uuid.uuid4().hex,))


@pytest.mark.processes
def test_where_there_is_no_memory_to_share_nobody_is_sent_to_look_for_proc(processes: Processes) -> None:
    first, *others = run(SIZE, on_macos, on=processes, args=(uuid.uuid4().hex,))
    assert "cannot share memory (rank 1: darwin has no memfd)" in first
    assert "several times slower; set MESHWISE_COMM=gloo to turn this message off" in first
    assert "/proc" not in first
    assert others == [""] * (SIZE - 1)


@pytest.mark.processes
def test_a_limit_on_file_sizes_is_reported(processes: Processes) -> None:
    first, *_ = run(SIZE, with_small_files, on=processes, args=(uuid.uuid4().hex,))
    assert "allow larger files (`ulimit -f unlimited`), or set MESHWISE_COMM=gloo to turn this message off" in first


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_waits_to_be_asked_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not has_ended(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(child.pid)
    assert has_ended(child.pid)


def test_nothing_is_forked_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_context().get_start_method() == "spawn"


IMPORTS = """
import os, pkgutil, sys, unittest.mock
import torch, torch._dynamo, torch.distributed.launcher.api, torch.distributed.elastic.multiprocessing
import rich.console, rich.live, rich.table, tyro, tomlkit, safetensors.torch
sys.platform = "darwin"
for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "O_DIRECT",
             "O_TMPFILE", "posix_fadvise"):
    if hasattr(os, name):
        delattr(os, name)
import meshwise
for module in pkgutil.walk_packages(meshwise.__path__, "meshwise."):
    if not module.name.endswith(("__main__", "dropout_kernel")):  # the kernel needs Triton, which is for GPUs
        __import__(module.name)
print(sum(name.startswith("meshwise.") for name in sys.modules))
"""


def test_every_module_is_imported_where_the_calls_of_linux_are_missing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
