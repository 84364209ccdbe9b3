"""Test failures of a rank outside its work: each ends the run, which would otherwise wait forever for a result.

The ranks are forked from the server that this process has already, but for those that import a script."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # not in torch's stubs

import script_processes
from meshwise.base.mesh import Mesh
from meshwise.comm.api.launcher_info import JobAttempt, RankKilledError, RankLostError, has_ended
from meshwise.comm.api.world import World
from meshwise.comm.health.watchdog import Watchdog
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.comm.launch.launch import cores, run
from meshwise.comm.launch.rank_process import RankOutcome, threads_from_environment
from meshwise.comm.shared_memory import host_connection, local_world

pytestmark = pytest.mark.processes

NO_RESULT = "of 2 ended with exit status 0 and no result; some code called os._exit, or C's exit"


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def finds_a_full_disk(_: World) -> None:
    RankOutcome.save = full  # type: ignore[method-assign] # in this rank alone


def test_a_rank_that_cannot_leave_its_result_ends_the_run_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankLostError):
        run(2, finds_a_full_disk)
    assert "No space left on device" in capfd.readouterr().err


def gives(_: World) -> Iterator[int]:
    return (number for number in range(3))


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        run(2, gives)
    assert str(caught.value) == "cannot pickle 'generator' object"
    named = "main returned a generator, which cannot be pickled; return a list of tensors, for example"
    assert any(named in note for note in caught.value.__notes__)


class Flushes:
    """An output that is full, once."""

    def __init__(self) -> None:
        self.failed = False

    def flush(self) -> None:
        if not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")


def finds_no_room_for_words(_: World) -> None:
    sys.stdout = Flushes()
    raise ZeroDivisionError


def test_a_rank_that_fails_and_cannot_leave_its_words_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        run(2, finds_no_room_for_words)
    assert "No space left on device" in capfd.readouterr().err


def exits(world: World) -> None:
    world.barrier()
    os._exit(0)


def exits_alone(world: World) -> None:
    if world.rank:
        os._exit(0)
    world.barrier()


@pytest.mark.parametrize("main, who", [(exits, "ranks 0 and 1"), (exits_alone, "rank 1")])
def test_ranks_that_end_well_without_a_result_are_named(main: Any, who: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankLostError) as caught:
        run(2, main)
    assert (type(caught.value), str(caught.value)) == (RankLostError, f"{who} {NO_RESULT}")
    assert capfd.readouterr().err == ""


IMPORTED = """
import os, sys, torch
from meshwise.comm.launch.launch import run

if __name__ == "__mp_main__" and "--import" in sys.argv:
    os._exit(0)

def threads(world):
    return torch.get_num_threads()

if __name__ == "__main__":
    print("returned", *run(2, threads))
    sys.argv.append("--import")
    try:
        run(2, threads)
    except Exception as error:
        print("raised", type(error).__name__)
        print(error)
"""


def test_ranks_that_import_a_script_have_their_threads_and_are_named_if_it_ends_them(tmp_path: Path) -> None:
    """A number of threads that is none leaves each rank its part of the cores."""
    said = script_processes.ended(IMPORTED, folder=tmp_path, OMP_NUM_THREADS="abc")
    part = max(1, cores() // 2)
    assert said.stdout == f"returned {part} {part}\nraised RankLostError\nranks 0 and 1 {NO_RESULT}\n"
    assert [line for line in said.stderr.split("\n") if line and "OMP_NUM_THREADS" not in line] == []


ordinary_lost = vars(host_connection)["rank_lost_error"]


def lost(*args: Any, **named: Any) -> Any:
    time.sleep(0.3)
    return ordinary_lost(*args, **named)


def dies_beside_a_slow_one(world: World) -> None:
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    vars(host_connection)["rank_lost_error"] = lost
    world.barrier()


def await_late_end(process: int) -> None:
    """Return when a process has ended; its end is told a while later, as the end of a large process is."""
    while not has_ended(process):
        time.sleep(0.01)
    since = time.monotonic()
    vars(host_connection)["has_ended"] = lambda pid: time.monotonic() > since + 0.3 and has_ended(pid)


def dies_once_it_has_given(world: Any) -> None:
    x = torch.ones(1 << 20)
    if world.rank:
        world.all_reduce(x, axes="rank")
        os.kill(os.getpid(), signal.SIGKILL)
    await_late_end(world._queues.host.peers[1].process)
    world.all_reduce(x, axes="rank").wait()


def dies_once_it_has_told(world: Any) -> None:
    if not world.rank:
        world.barrier = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        teller = world._queues.host.peers[0]
        mapped = vars(local_world)["open_segment"]

        def late(process: int, *, place: int) -> Any:
            await_late_end(teller.process)
            return mapped(process, place=place)

        vars(local_world)["open_segment"] = late
    world.shared_empty(1 << 20, dtype=torch.float32, axes="rank")


@pytest.mark.parametrize(
    "main, who, call",
    [
        pytest.param(dies_beside_a_slow_one, 1, "#0 barrier[rank]", id="the launcher waits for the other's report"),
        pytest.param(dies_once_it_has_given, 1, "#0 all_reduce[rank]", id="its memory goes before its end is visible"),
        pytest.param(dies_once_it_has_told, 0, "World.shared_empty", id="after it has made a joint tensor"),
    ],
)
def test_a_killed_rank_is_named_by_the_launcher_and_by_the_other(main: Any, who: int, call: str) -> None:
    with pytest.raises(RankKilledError) as caught:
        run(2, main)
    assert str(caught.value) == f"rank {who} of 2 ended without an exception, killed by SIGKILL"
    assert caught.value.__notes__[0].startswith(f"rank {1 - who} then failed: rank {who} was lost in {call}")


def one_exits_in_a_group(world: World) -> None:
    world = world.over(Mesh.of(a=2, b=2))
    while True:
        if world.rank == 3:
            os._exit(0)
        world.all_reduce(torch.ones(3), axes="b").wait()


def test_one_that_ends_well_is_named_where_others_do_not_wait_for_it() -> None:
    with pytest.raises(RankLostError) as caught:
        run(4, one_exits_in_a_group)
    assert str(caught.value) == f"rank 3 {NO_RESULT.replace('of 2', 'of 4')}"


def exits_once(world: World) -> str:
    attempt = JobAttempt.current()
    assert attempt is not None
    if world.rank and not attempt.restarts:
        os._exit(0)
    world.barrier()
    return "all"


def test_such_a_rank_is_a_failure_after_which_all_are_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(2, exits_once, restarts=1) == ["all", "all"]
    assert capfd.readouterr().err == f"meshwise: restart 1 of 1, because RankLostError: rank 1 {NO_RESULT}\n"


@pytest.mark.parametrize(
    "said, threads", [("3", 3), ("2,1", 2), (" 04 ", 4), ("", None), ("0", None), ("-1", None), ("9" * 20, None)]
)
def test_threads_are_read_as_openmp_reads_them(said: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads_from_environment() == threads


@pytest.mark.parametrize("said", ["abc", "-1", "0", "nan", ""])
def test_a_patience_that_is_no_number_names_its_variable(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWISE_STALL_SECONDS", said)
    with pytest.raises(ValueError, match=f"MESHWISE_STALL_SECONDS={said}: it has to be a number of seconds above 0"):
        Watchdog(run_threads(1, itself)[0], store=HashStore())


def itself(world: World) -> World:
    return world
