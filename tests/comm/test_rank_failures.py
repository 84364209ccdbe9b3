"""Test failures of a rank outside its work: each ends the run, which would otherwise wait forever for a result."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # not in torch's stubs

import script_processes
from meshwise.comm import World
from meshwise.comm.health.watchdog import Watchdog
from meshwise.comm.in_process.thread_world import run_threads
from meshwise.comm.launch.cores import cores
from meshwise.comm.launch.rank_process import asked_threads

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys, time, torch
from meshwise.comm import run
from meshwise.comm.shared_memory import host_connection as host
from meshwise.base.mesh import Mesh
from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.comm.api.process_life import ProcessLife
from meshwise.comm.launch.rank_outcome import RankOutcome

if __name__ == "__mp_main__" and "--import" in sys.argv:
    os._exit(0)

def threads(world):
    return torch.get_num_threads()

def full(outcome, folder, *, rank):
    raise OSError(28, "No space left on device")

def finds_a_full_disk(world):
    RankOutcome.save = full

class Flushes:
    def __init__(self):
        self.failed = False

    def flush(self):
        if not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")

def finds_no_room_for_words(world):
    sys.stdout = Flushes()
    raise ZeroDivisionError

def exits(world):
    world.barrier()
    os._exit(0)

def exits_alone(world):
    if world.rank:
        os._exit(0)
    world.barrier()

def lost(*args, ordinary=host.lost, **named):
    time.sleep(0.3)
    return ordinary(*args, **named)

def dies_beside_a_slow_one(world):
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    host.lost = lost
    world.barrier()

class Later(ProcessLife):
    # Its end is told a while after its memory has gone, as that of a large process is.
    since = None

    @property
    def ended(self):
        if not super().ended:
            return False
        self.since = self.since or time.monotonic()
        return time.monotonic() > self.since + 0.3

def dies_once_it_has_given(world):
    x = torch.ones(1 << 20)
    if world.rank:
        world.all_reduce(x, axes="rank")
        os.kill(os.getpid(), signal.SIGKILL)
    life = world._queues.host.peer(1).life
    while not life.ended:
        time.sleep(0.01)
    life.__class__ = Later
    world.all_reduce(x, axes="rank").wait()

def dies_once_it_has_told(world):
    if not world.rank:
        world.barrier = lambda **named: os.kill(os.getpid(), signal.SIGKILL)
    else:
        teller = world._queues.host.peer(0)
        mapped = teller.slabs.map
        def late(place):
            while not teller.life.ended:
                time.sleep(0.01)
            teller.life.__class__ = Later
            return mapped(place)
        teller.slabs.map = late
    world.shared_empty(1 << 20, dtype=torch.float32, axes="rank")

def one_exits_in_a_group(world):
    world = world.over(Mesh.of(a=2, b=2))
    while True:
        if world.rank == 3:
            os._exit(0)
        world.all_reduce(torch.ones(3), axes="b").wait()

def gives(world):
    return (number for number in range(3))

def exits_once(world):
    if world.rank and not JobAttempt.current().number:
        os._exit(0)
    world.barrier()
    return "all"

if __name__ == "__main__":
    try:
        print("returned", *run({size}, {main}))
    except Exception as error:
        print("raised", type(error).__name__)
        print(error)
        if "--notes" in sys.argv:
            print(*error.__notes__, sep="\\n")
"""
NO_RESULT = "of 2 ended with exit status 0 and no result; something calls os._exit there, or C's exit"


def ended(folder: Path, main: str, threads: str, *words: str, size: int = 2) -> subprocess.CompletedProcess[str]:
    """What a script with ranks that call this says."""
    return script_processes.ended(SCRIPT.format(main=main, size=size), *words, folder=folder, OMP_NUM_THREADS=threads)


def test_a_number_of_threads_that_is_none_leaves_each_rank_its_part_of_the_cores(tmp_path: Path) -> None:
    part = max(1, cores() // 2)
    assert ended(tmp_path, "threads", "abc").stdout == f"returned {part} {part}\n"


def test_a_rank_that_cannot_leave_its_result_ends_the_run_and_says_why(tmp_path: Path) -> None:
    said = ended(tmp_path, "finds_a_full_disk", "1")
    assert said.stdout.startswith("raised RankLostError\n")
    assert "No space left on device" in said.stderr


def test_a_result_that_cannot_travel_is_named(tmp_path: Path) -> None:
    said = ended(tmp_path, "gives", "1", "--notes").stdout
    assert said.startswith("raised TypeError\ncannot pickle 'generator' object\n")
    assert "main returned a generator, which cannot be pickled; return a list of tensors, for example\n" in said


def test_a_rank_that_fails_and_cannot_leave_its_words_ends_the_run(tmp_path: Path) -> None:
    said = ended(tmp_path, "finds_no_room_for_words", "1")
    assert said.stdout.startswith("raised ZeroDivisionError\n")
    assert "No space left on device" in said.stderr


@pytest.mark.parametrize(
    "main, words, who",
    [("exits", (), "ranks 0 and 1"), ("exits_alone", (), "rank 1"), ("threads", ("--import",), "ranks 0 and 1")],
)
def test_ranks_that_end_well_without_a_result_are_named(
    main: str, words: tuple[str, ...], who: str, tmp_path: Path
) -> None:
    said = ended(tmp_path, main, "1", *words)
    assert said.stdout == f"raised RankLostError\n{who} {NO_RESULT}\n"
    assert said.stderr == ""


def test_the_launcher_waits_for_the_report_of_a_lost_rank(tmp_path: Path) -> None:
    said = ended(tmp_path, "dies_beside_a_slow_one", "1", "--notes").stdout.splitlines()
    assert said[:2] == ["raised RankKilledError", "rank 1 of 2 ended without an exception, killed by SIGKILL"]
    assert said[2].startswith("rank 0 then met: rank 1 was lost in #0 barrier[rank]")


def test_a_rank_whose_memory_goes_before_its_end_is_visible_is_lost(tmp_path: Path) -> None:
    said = ended(tmp_path, "dies_once_it_has_given", "1", "--notes").stdout.splitlines()
    assert said[:2] == ["raised RankKilledError", "rank 1 of 2 ended without an exception, killed by SIGKILL"]
    assert said[2].startswith("rank 0 then met: rank 1 was lost in #0 all_reduce[rank]")


def test_a_rank_that_dies_after_making_a_joint_tensor_is_lost(tmp_path: Path) -> None:
    said = ended(tmp_path, "dies_once_it_has_told", "1", "--notes").stdout.splitlines()
    assert said[:2] == ["raised RankKilledError", "rank 0 of 2 ended without an exception, killed by SIGKILL"]
    assert said[2].startswith("rank 1 then met: rank 0 was lost in World.shared_empty")


def test_one_that_ends_well_is_named_where_others_do_not_wait_for_it(tmp_path: Path) -> None:
    said = ended(tmp_path, "one_exits_in_a_group", "1", size=4)
    assert said.stdout == f"raised RankLostError\nrank 3 {NO_RESULT.replace('of 2', 'of 4')}\n"


def test_such_a_rank_is_a_failure_after_which_all_are_started_again(tmp_path: Path) -> None:
    said = ended(tmp_path, "exits_once, restarts=1", "1")
    assert said.stdout == "returned all all\n"
    assert said.stderr == f"meshwise: restart 1 of 1, because RankLostError: rank 1 {NO_RESULT}\n"


@pytest.mark.parametrize(
    "said, threads", [("3", 3), ("2,1", 2), (" 04 ", 4), ("", None), ("0", None), ("-1", None), ("9" * 20, None)]
)
def test_threads_are_read_as_openmp_reads_them(said: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert asked_threads() == threads


@pytest.mark.parametrize("said", ["abc", "-1", "0", "nan", ""])
def test_a_patience_that_is_no_number_names_its_variable(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWISE_STALL_SECONDS", said)
    with pytest.raises(ValueError, match=f"MESHWISE_STALL_SECONDS={said}: it has to be a number of seconds above 0"):
        Watchdog(run_threads(1, itself)[0], store=HashStore())


def itself(world: World) -> World:
    return world
