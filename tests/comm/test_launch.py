"""Test the launch of ranks: results, errors, and that no rank process survives."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.launch import connect as connecting
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.fork_server import start_context
from meshwise.comm.launch.launch import NoSemaphoresError, cores, run, torchrun_line
from meshwise.comm.network.choose_world import takes_nccl
from warm_command import WarmCommand
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 2
START_SECONDS = 200.0
END_SECONDS = 200.0
STARTING = """
from pathlib import Path
import os, sys, time
import torch
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.launch import run

def main(world, folder):
    (Path(folder) / f"{world.rank}.pid").write_text(str(os.getpid()))
    x = torch.ones(1)
    world.all_reduce(x, axes="rank").wait()
    return x.item()
"""

# One rank blocks inside gloo, the other in Python. As a notebook's, which starts its ranks in no time.
BLOCKED = """
def blocked(world, folder):
    main(world, folder)
    world.barrier() if world.rank else time.sleep(100)

run({size}, blocked, args=("{folder}",))
"""

# As a notebook's too. What run raises, for each main that goes wrong in its own way.
WRONG = """
import json, os, signal
from meshwise.comm.launch.launch import run

def raises_on_the_last(world):
    if world.rank == world.size - 1:
        raise ZeroDivisionError("this rank only")
    world.barrier()

def dies_on_the_last(world):
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()

def calls_alone(world):
    if world.rank == 0:
        world.barrier()

for main in (raises_on_the_last, dies_on_the_last, calls_alone):
    try:
        run({size}, main)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), *getattr(error, "__notes__", [])]))
"""


def total(world: World, offset: float) -> tuple[float, torch.Tensor, int, str]:
    x = torch.tensor(world.rank + offset)
    world.all_reduce(x, axes="rank").wait()
    return x.item(), torch.full((2,), world.rank), torch.get_num_threads(), type(world).__name__


def kept_from_the_collector(_: World) -> int:
    return gc.get_freeze_count()


def ranks_of(folder: Path, process: WarmCommand) -> list[int]:
    """The process ids of all ranks, once they have met."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = [file.read_text() for file in folder.glob("*.pid")]
        if len(found) == SIZE and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    process.process.kill()
    pytest.fail(f"the ranks did not start\n{process.end()}")


def gone(pid: int) -> bool:
    """Whether the process has ended (one that nobody has waited for yet counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, before it was read
        return True


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        if all(gone(pid) for pid in pids):
            return True
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return False


def test_run_returns_what_main_returned_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    handler, environment = signal.getsignal(signal.SIGINT), dict(os.environ)
    results = run(SIZE, partial(total, offset=0.5), comm="gloo")
    assert [result[0] for result in results] == [2.0, 2.0]
    assert [result[1].tolist() for result in results] == [[0, 0], [1, 1]]
    assert [result[2] for result in results] == [max(1, cores() // SIZE)] * SIZE
    assert [result[3] for result in results] == ["GlooWorld"] * SIZE, "as it was told"
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == environment


def test_a_rank_does_not_garbage_collect_what_the_server_imported() -> None:
    assert min(run(SIZE, kept_from_the_collector)) > 10_000


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By the name of its class, the words of each error and its notes. Nothing else is said."""
    words, stall = ("-c", WRONG.format(size=SIZE)), {"MESHWISE_STALL_SECONDS": "12"}
    _, output, errors = WarmCommand(*words, folder=tmp_path_factory.mktemp("wrong"), variables=stall).end()
    assert errors == ""
    told = [json.loads(line) for line in output.splitlines()]
    return {name: words for name, *words in told}


def test_the_error_of_the_rank_that_failed_is_raised_with_its_traceback(raised: dict[str, list[str]]) -> None:
    words, note = raised["ZeroDivisionError"]
    assert words == "this rank only"
    assert "rank 1 of 2" in note
    assert "in raises_on_the_last" in note


def test_a_rank_that_ends_without_a_word_is_named(raised: dict[str, list[str]]) -> None:
    words, note, advice = raised["RankKilledError"]
    assert words == "rank 1 of 2 ended without an exception, killed by SIGKILL"
    assert "rank 0 then failed: rank 1 was lost in #0 barrier[rank]" in note
    assert "when memory runs out" in advice


def test_the_report_of_the_watch_is_what_is_raised(raised: dict[str, list[str]]) -> None:
    words = raised["RanksDisagree"][0]
    assert "barrier[rank]" in words
    assert "rank 1" in words


def leaves(world: World, who: tuple[int, ...]) -> None:
    if world.rank in who:
        sys.exit()
    world.barrier()


def test_ranks_that_all_leave_have_left() -> None:
    with pytest.raises(SystemExit) as left:
        run(SIZE, leaves, args=((0, 1),))
    assert not left.value.code


def test_a_rank_that_leaves_others_waiting_is_no_good_end() -> None:
    with pytest.raises(RanksDisagree, match=r"rank 1 .*close\[rank\]"):
        run(SIZE, leaves, args=((1,),))


def returns_or_leaves(world: World) -> int:
    world.barrier()
    return world.rank or sys.exit()


def test_a_rank_that_leaves_when_others_have_returned_has_no_result() -> None:
    with pytest.raises(RankLostError, match=r"rank 0 of 2 left by sys[.]exit, but other ranks did not"):
        run(SIZE, returns_or_leaves)


def test_what_cannot_be_started_is_refused_at_once() -> None:
    def inside(world: World) -> None: ...

    for main in (inside, partial(inside)):
        with pytest.raises(ValueError, match="inside cannot be pickled for another process"):
            run(SIZE, main)
    with pytest.raises(ValueError, match="cannot run on 0 ranks"):
        run(0, total, args=(0.0,))
    with pytest.raises(ValueError, match=r"cannot run on 2\.0 ranks"):
        run(2.0, total, args=(0.0,))  # type: ignore[arg-type] # as a division gives it


@pytest.mark.parametrize("room", [0, 3])
def test_a_system_without_room_for_semaphores_says_where(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    made: list[object] = []
    lock = BaseContext.Lock

    def full(context: BaseContext) -> object:
        if len(made) == room:
            raise OSError(28, "No space left on device")
        made.append(lock(context))
        return made[-1]

    monkeypatch.setattr("multiprocessing.context.BaseContext.Lock", full)
    told = "No space left on device: starting ranks needs semaphores in /dev/shm: 2 per rank and 5 more, a page each"
    with pytest.raises(NoSemaphoresError, match=told):
        run(SIZE, total, args=(0.0,))


def test_a_script_without_the_main_guard_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{STARTING}run({SIZE}, main, args=('{tmp_path}',))")
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_SECONDS)
    assert ended.returncode != 0
    assert ended.stderr.count('put the call under `if __name__ == "__main__":`') >= 1


SESSION = f"""
import torch
import meshwise as mw

def squares(output, batch):
    return output.square().sum(), len(batch)

def main(world=None):
    trainer = mw.parallelize(torch.nn.Linear(256, 256), "dp=auto", loss=squares, world=world, lr=0.1)
    trainer.step(torch.ones(4096, 256))
    return trainer.world.size

torch.set_num_threads(2)
print(main(), mw.run({SIZE}, main), mw.run({SIZE}, lambda world: world.rank))
"""


def test_functions_of_a_notebook_run_too_after_it_has_trained_alone(tmp_path: Path) -> None:
    """Also with several threads, which a fork of the session does not have."""
    said = WarmCommand("-c", SESSION, folder=tmp_path, variables={"OMP_NUM_THREADS": "2"}).end()
    assert said == (0, f"1 {[SIZE] * SIZE} {[*range(SIZE)]}\n", "")


@pytest.mark.parametrize(
    "end, send", [("SIGINT", os.killpg), ("SIGTERM", os.kill), ("SIGKILL", os.kill)], ids=["Ctrl-C", "TERM", "KILL"]
)
def test_no_rank_outlives_its_launcher(end: str, send: Callable[[int, int], None], tmp_path: Path) -> None:
    temporary = tmp_path / "temporary files"
    temporary.mkdir()
    body = STARTING + BLOCKED.format(size=SIZE, folder=tmp_path)
    process = WarmCommand("-c", body, folder=tmp_path, variables={"TMPDIR": str(temporary)})
    ranks = ranks_of(tmp_path, process)
    time.sleep(0.3)
    send(process.pid, signal.Signals[end])
    status, _, errors = process.end()
    assert status == -signal.Signals[end]
    assert all_gone(ranks)
    said = [line for line in errors.splitlines() if "resource_tracker" not in line and "warnings.warn" not in line]
    assert said == (["stopped by Ctrl-C; all ranks have ended"] if end == "SIGINT" else []), errors
    assert bool(list(temporary.iterdir())) == (end == "SIGKILL")


def test_the_fork_server_ignores_ctrl_c() -> None:
    """It would tell where in its imports it was."""
    if start_context().get_start_method() != "forkserver":
        pytest.skip("ranks are started one by one")
    status = Path(f"/proc/{vars(forkserver._forkserver)['_forkserver_pid']}/status").read_text()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1


def joins(world: World) -> tuple[list[float], bool]:
    """What `run` returns to a rank that torchrun has started, and whether the ranks are those that there are."""
    found = run(world.size, total, args=(0.5,))
    return [result[0] for result in found], connect() is world


def test_under_torchrun_the_same_script_connects(processes: Processes) -> None:
    """That a whole job runs so is in the tests of `meshwise train`."""
    assert processes.run(SIZE, joins) == [([2.0, 2.0], True)] * SIZE


def test_the_line_for_torchrun_starts_the_same_script() -> None:
    line = torchrun_line(SIZE, ["script.py", "--x"])
    assert line.split()[0] == "torchrun"
    assert line.endswith(" script.py --x")


def test_another_size_than_torchruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"run\(4, …\) in a job of 1 ranks; start torchrun with 4 processes"):
        run(4, total, args=(0.0,))


def test_a_way_to_join_ranks_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_worlds", dict)  # as if this process had not joined any
    monkeypatch.setenv("MESHWISE_COMM", "mpi")
    with pytest.raises(ValueError, match="MESHWISE_COMM=mpi is unknown; the ways to connect"):
        connect(device="cpu")
    with pytest.raises(
        ValueError, match=r"^comm='shm' is unknown; the ways to connect the ranks of one host are auto, local, gloo"
    ):
        run(SIZE, total, args=(0.0,), comm="shm")  # type: ignore[arg-type]


def test_an_environment_that_says_nothing_leaves_it_to_where_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWISE_COMM", "")
    assert connecting.comm_from_environment() == "auto"


@pytest.mark.parametrize(
    "devices, takes",
    [
        (["cuda A", "cuda B"], True),
        (["cuda A", "cuda A"], False),
        (["cuda A shared", "cuda A shared"], True),
        (["cuda A shared", "cuda A"], False),
        (["cuda A shared", "cuda B"], True),
    ],
)
def test_ranks_use_nccl_if_each_has_a_gpu_or_all_may_share_theirs(devices: list[str], takes: bool) -> None:
    assert takes_nccl(devices) == takes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cuda:1', but torch finds no GPU here"):
        connect(device="cuda:1")


def test_without_torchrun_the_world_is_this_process() -> None:
    before = set(threading.enumerate())
    world = connect(device="cpu")
    assert (world.rank, world.size, str(world.mesh)) == (0, 1, "rank=1")
    assert connect(device="cpu") is world
    x = torch.ones(3)
    world.all_reduce(x, axes="rank").wait()
    world.barrier()
    assert world.exchange("a") == ["a"]
    assert x.tolist() == [1, 1, 1]
    assert not set(threading.enumerate()) - before
