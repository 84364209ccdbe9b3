"""Test real processes that hang, die or disagree: one report names rank, place and cause, and no process is left.

The ranks are forked from a server that has imported torch, so a world of three starts in a fraction of a second. Each
rank runs this file under the name `__rank__`, which calls the scenario that a test named."""

import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshwise.comm.api.launcher_info import LauncherProcess, has_ended
from meshwise.comm.api.world import World
from meshwise.comm.health.watchdog import Watchdog, _Pace
from meshwise.comm.network.choose_world import process_world

SIZE = 3
# Beats, a survey and the end take a few seconds; a machine with other work to do may take all of it.
SOON = 200.0

# Only the beats, and how long a rank waits before it asks, are waited for. A machine may stand still for the others.
PACE = {"beat": 0.2, "suspect": 0.8, "silent": 60.0, "stall": 150.0}
IMPATIENT = PACE | {"beat": 0.5, "silent": 4.0}
"""Where a rank is silent for good; that its connection broke makes six beats of it."""

pytestmark = pytest.mark.processes
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "meshwise.comm.network.choose_world", "meshwise.comm.health.watchdog", "pytest"]
)


def until(holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    ends = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < ends, otherwise()
        time.sleep(0.02)


@dataclass
class Ranks:
    """The ranks of one scenario while they run, and what they have printed."""

    processes: Sequence[BaseProcess]
    logs: list[Path]
    port: int

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for(self, text: str, rank: int) -> None:
        until(lambda: text in self.logs[rank].read_text(), self.output)

    def wait_for_beat(self, where: str, rank: int) -> None:
        """Until the others could read where a rank was, were it to stop."""
        store = PrefixStore("meshwise/watch", TCPStore("127.0.0.1", self.port, is_master=False))
        alive = f"alive/{rank}"
        until(lambda: store.check([alive]) and where in pickle.loads(store.get(alive))[1], self.output)

    def ended(self, *, without: int | None = None) -> list[int | None]:
        """The exit statuses, all of which have to be there soon."""
        ends = time.monotonic() + SOON
        for rank, process in enumerate(self.processes):
            if rank != without:
                process.join(max(0.0, ends - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        return "".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(self.logs))

    def report(self) -> str:
        """The one report there is, without the time-dependent parts."""
        reports = [part for log in self.logs for part in log.read_text().split("meshwise: ")[1:]]
        assert len(reports) == 1, self.output()
        return re.sub(r"\d+\.\d s", "_ s", re.sub(r"process \d+ on \S+?(?=[):])", "process _", reports[0]))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Start the ranks of a scenario; whatever is left of them at the end of the test is killed."""
    started: list[Ranks] = []
    stores = []

    def _start(scenario: str, *, port: int | None = None, pace: dict[str, float] = PACE) -> Ranks:
        if port is None:
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            port = stores[-1].port
        logs = [tmp_path / f"{scenario}-{rank}" for rank in range(SIZE)]
        processes = []
        for rank, log in enumerate(logs):
            log.touch()
            given = {"SCENARIO": scenario, "RANK": rank, "PORT": port, "LOG": str(log), "OWN_PACE": pace}
            processes.append(_SERVER.Process(target=runpy.run_path, args=(__file__, given, "__rank__")))
            processes[-1].start()
        started.append(Ranks(processes, logs, port))
        return started[-1]

    yield _start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.join()


# ---- in a rank -----------------------------------------------------------------------------------------------------


def run_rank(given: dict[str, Any]) -> None:
    log = os.open(given["LOG"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(given["RANK"]),
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(given["PORT"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    world = process_world(torch.device("cpu"))
    store = TCPStore("127.0.0.1", given["PORT"], is_master=False)
    watch = Watchdog(world, store=store)
    watch._pace = _Pace(**given["OWN_PACE"])
    watch.start()
    store.set(f"watched/{given['RANK']}", "")
    store.wait([f"watched/{rank}" for rank in range(SIZE)])  # who has no watch yet would be silent
    try:
        SCENARIOS[given["SCENARIO"]](world)
        world.close()
    except Exception:
        sys.excepthook(*sys.exc_info())  # what the interpreter does with an exception that nobody catches
        raise
    finally:
        watch.stop()


SCENARIOS: dict[str, Callable[[World], None]] = {}


def scenario(main: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS[main.__name__] = main
    return main


def reduce(world: World, *, elements: int = 3) -> None:
    world.all_reduce(torch.ones(elements), axes="rank").wait()


# ---- scenarios and what is reported --------------------------------------------------------------------------------


@scenario
def one_is_slow_for_a_while(world: World) -> None:
    for step in range(2):
        reduce(world)
        if world.rank == step:
            time.sleep(1.2)  # longer than what is surveyed, shorter than what is warned about


def test_a_rank_that_computes_for_a_while_is_left_alone(start: Callable[..., Ranks]) -> None:
    ranks = start("one_is_slow_for_a_while")
    assert ranks.ended() == [0, 0, 0], ranks.output()
    assert "meshwise" not in ranks.output()


@scenario
def another_shape(world: World) -> None:
    reduce(world)
    reduce(world, elements=4 if world.rank == 2 else 3)


def test_another_shape_is_reported_with_both_parties(start: Callable[..., Ranks]) -> None:
    ranks = start("another_shape")
    assert ranks.ended() == [1, 1, 1]
    report = ranks.report()
    assert "called different collectives" in report
    assert re.search(r"ranks 0,1 +#1 all_reduce\[rank\] sum 3 float32 at comm/test_watchdog.py:\d+ reduce", report)
    assert re.search(r"rank 2 +#1 all_reduce\[rank\] sum 4 float32", report)
    assert "another_shape" in report, "the stacks show who called it"


@scenario
def another_collective(world: World) -> None:
    x = torch.ones(3)
    if world.rank == 1:
        world.broadcast(x, axes="rank").wait()
    world.all_reduce(x, axes="rank").wait()


def test_another_collective_is_reported_with_both_parties(start: Callable[..., Ranks]) -> None:
    ranks = start("another_collective")
    assert ranks.ended() == [1, 1, 1]
    assert re.search(r"ranks 0,2 +#0 all_reduce\[rank\] sum 3", ranks.report())
    assert re.search(r"rank 1 +#0 broadcast\[rank\] from 0 3", ranks.report())


@scenario
def one_closes_early(world: World) -> None:
    reduce(world)
    if world.rank != 1:
        reduce(world)


def test_a_rank_that_closes_early_is_reported(start: Callable[..., Ranks]) -> None:
    ranks = start("one_closes_early")
    assert ranks.ended() == [1, 1, 1]
    assert re.search(r"ranks 0,2 +#1 all_reduce\[rank\] sum 3", ranks.report())
    assert re.search(r"rank 1 +#1 close\[rank\]", ranks.report())


@scenario
def one_leaves_early(world: World) -> None:
    reduce(world)
    if world.rank == 1:
        raise SystemExit
    reduce(world)


def test_a_rank_that_left_early_is_reported(start: Callable[..., Ranks]) -> None:
    ranks = start("one_leaves_early", pace=IMPATIENT)
    assert ranks.ended() == [1, 0, 1]
    assert "rank 1 has finished while others wait" in ranks.report()
    assert re.search(r"rank 2 \(process _\).*#1 all_reduce\[rank\]", ranks.report())


@scenario
def one_raises(world: World) -> None:
    reduce(world)
    if world.rank == 2:
        raise ValueError("no such column: 'txt'")
    reduce(world)


def test_an_exception_ends_all_ranks_with_its_traceback(start: Callable[..., Ranks]) -> None:
    ranks = start("one_raises")
    assert ranks.ended() == [1, 1, 1]
    report = ranks.report()
    assert report.startswith("rank 2 of 3 (process _) failed:\nTraceback")
    assert report.rstrip().endswith("ValueError: no such column: 'txt'")


class Slow:
    """A terminal that takes a few beats of the watch for each line."""

    def write(self, text: str) -> None:
        time.sleep(1.0)
        os.write(2, text.encode())

    def flush(self) -> None:
        """Nothing is held back."""


@scenario
def one_raises_before_a_slow_terminal(world: World) -> None:
    sys.stderr = Slow()
    one_raises(world)


def test_an_exception_is_reported_once_however_long_the_report_takes(start: Callable[..., Ranks]) -> None:
    ranks = start("one_raises_before_a_slow_terminal")
    assert ranks.ended() == [1, 1, 1]
    assert ranks.report().startswith("rank 2 of 3 (process _) failed:\nTraceback")


@scenario
def forever(world: World) -> None:
    while True:
        reduce(world)
        print("step", flush=True)


def test_a_killed_rank_is_reported_and_the_others_end(start: Callable[..., Ranks]) -> None:
    ranks = start("forever", pace=IMPATIENT)
    ranks.wait_for("step", 1)
    os.kill(ranks.pid(1), signal.SIGKILL)
    assert ranks.ended() == [1, -signal.SIGKILL, 1]
    assert "rank 1 does not answer" in ranks.report()
    assert re.search(r"rank 1 \(process _\).*; the process has ended", ranks.report())


def test_a_stopped_rank_is_reported_and_the_others_end(start: Callable[..., Ranks]) -> None:
    ranks = start("forever", pace=IMPATIENT)
    ranks.wait_for_beat("forever", 0)
    os.kill(ranks.pid(0), signal.SIGSTOP)
    assert ranks.ended(without=0) == [None, 1, 1]
    report = ranks.report()
    assert "rank 0 does not answer" in report
    assert "the process is stopped or stuck" in report
    assert re.search(r"  _ s ago rank 0 was here:\n(.*\n)* .*test_watchdog.py:\d+ forever", report)
    assert re.search(r"rank 1 \(process _\) has waited _ s.* all_reduce\[rank\] sum 3 float32 at", report)


@scenario
def one_sleeps(world: World) -> None:
    reduce(world)
    print("met", flush=True)
    if world.rank == 1:
        time.sleep(100)
    reduce(world)


def test_a_slow_rank_is_warned_about_and_then_ended_with_its_stack(start: Callable[..., Ranks]) -> None:
    ranks = start(
        "one_sleeps", pace=PACE | {"stall": 16.0}
    )  # a machine that stands still for half of it has no warning
    assert ranks.ended() == [1, 1, 1]
    reports = ranks.output().split("meshwise: ")[1:]
    assert len(reports) == 2, "a warning, then the end"
    for report in reports:
        assert re.match(r"others have waited \d+ s for rank 1\n", report)
        assert "time.sleep(100)" in report
    [warning] = [report for report in reports if "the job goes on" in report]
    assert "MESHWISE_STALL_SECONDS" in warning


@scenario
def a_circle(world: World) -> None:
    world.recv(torch.empty(3), axis="rank", source=(world.rank + 1) % world.size).wait()


def test_a_circle_of_waiting_ranks_is_reported(start: Callable[..., Ranks]) -> None:
    ranks = start("a_circle")
    assert ranks.ended() == [1, 1, 1]
    report = ranks.report()
    assert "ranks wait for each other" in report
    for rank in range(SIZE):
        assert re.search(rf"rank {rank} \(process _\) has waited _ s for rank {(rank + 1) % SIZE} ", report)


def _host_store(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(1000)


def test_without_the_store_a_waiting_rank_ends(start: Callable[..., Ranks]) -> None:
    here, there = _SERVER.Pipe()
    host = _SERVER.Process(target=runpy.run_path, args=(__file__, {"PIPE": there}, "__store__"))
    host.start()
    ranks = start("one_sleeps", port=here.recv())
    ranks.wait_for("met", rank=0)
    time.sleep(0.5)
    host.kill()
    host.join()
    ranks.processes[0].join(SOON)
    assert ranks.processes[0].exitcode == 1
    assert "the job's store is gone" in ranks.logs[0].read_text()


@scenario
def the_launcher_dies(world: World) -> None:
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=outlive_the_launcher, args=(world, there)).start()
    here.recv()
    os._exit(0)


def outlive_the_launcher(world: World, pipe: Any) -> None:
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    print(f"rank is process {os.getpid()}", flush=True)
    watch = Watchdog(world, store=store, launcher=LauncherProcess())
    watch._pace = _Pace(**PACE)
    watch.start()
    pipe.send("it watches")
    time.sleep(1000)


def test_a_rank_ends_when_its_launcher_is_gone(start: Callable[..., Ranks]) -> None:
    ranks = start("the_launcher_dies")
    ranks.wait_for("its launcher", 0)
    [pid] = re.findall(r"rank is process (\d+)", ranks.logs[0].read_text())
    until(lambda: has_ended(int(pid)), ranks.output)


if __name__ == "__rank__":
    run_rank(globals())
if __name__ == "__store__":
    _host_store(globals()["PIPE"])
