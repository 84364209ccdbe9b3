"""The doctor examines a job, with everything that can be made to go wrong on one machine."""

import os
import socket
from collections.abc import Iterator, Mapping
from unittest import mock

import pytest

from free_port import free_port
from meshwise.bench.doctor import DoctorReport, MachineFinding, check_port, check_reachable, examine_job
from meshwise.cli.main import main
from meshwise.comm.api.world import World
from meshwise.comm.network.job_store import address_towards, roll_call
from warm_command import WarmCommand
from warm_processes import Processes

JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def problems(findings: tuple[MachineFinding, ...] | list[MachineFinding]) -> list[str]:
    return [finding.what for finding in findings if finding.level == "problem"]


def examined(environment: Mapping[str, str], *, seconds: float = 0.5) -> DoctorReport:
    with mock.patch.dict(os.environ, {**JOB, **environment}):
        return examine_job(seconds=seconds)


@pytest.mark.parametrize(
    "environment, problem",
    [
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**JOB, "MASTER_PORT": "x"}, "not a whole number: MASTER_PORT=x"),
        ({**JOB, "MASTER_PORT": "1", "RANK": "2"}, "RANK=2 in a world of WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_a_problem(
    environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(os.environ, environment):
        assert problems(examine_job().findings) == [problem]


def test_a_name_that_does_not_resolve() -> None:
    finding = check_reachable("no-such-host.invalid", port=1, seconds=0.1)
    assert finding is not None
    assert "MASTER_ADDR=no-such-host.invalid does not resolve" in finding.what
    assert "/etc/hosts" in finding.remedy


def test_a_port_that_nobody_listens_on(port: int) -> None:
    report = examined({"RANK": "1", "MASTER_PORT": str(port)})
    assert problems(report.findings) == [f"nothing listens at 127.0.0.1:{port} (refused for 0.5 s)"]
    assert not report.healthy


def test_a_machine_that_does_not_answer() -> None:
    with mock.patch("socket.create_connection", side_effect=TimeoutError("timed out")):
        finding = check_reachable("127.0.0.1", port=29500, seconds=0.1)
        assert finding is not None
    assert "does not answer within 0.1 s" in finding.what
    assert "firewall" in finding.remedy


def test_a_store_that_answers_has_no_findings(taken: int) -> None:
    assert check_reachable("127.0.0.1", port=taken, seconds=0.1) is None


def test_a_port_that_another_program_has(taken: int) -> None:
    finding = check_port(taken)
    assert finding is not None
    assert finding.what == f"rank 0 cannot open port {taken}: address already in use"
    assert problems(examined({"MASTER_PORT": str(taken)}).findings) == [finding.what]


def test_a_rank_that_does_not_come(port: int) -> None:
    report = examined({"MASTER_PORT": str(port)})
    assert problems(report.findings) == ["rank 1 of 2 did not answer the roll call within 0.5 s"]


# ---- a roll call among processes ---------------------------------------------------------------------------------


def roll_call_at(world: World, port: int, sizes: list[int], ranks: list[int]) -> list[tuple[int, int, str]]:
    environment = {
        "RANK": str(ranks[world.rank]),
        "WORLD_SIZE": str(sizes[world.rank]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "",
    }
    with mock.patch.dict(os.environ, environment):
        entries, _ = roll_call({"torch": "2.13" if world.rank else "2.11"}, seconds=3.0)
    world.barrier()
    return [(entry.rank, entry.size, entry.facts["torch"]) for entry in entries]


@pytest.mark.processes
@pytest.mark.parametrize(
    "sizes, ranks, heard",
    [
        ([2, 2], [0, 1], [(0, 2, "2.11"), (1, 2, "2.13")]),
        ([2, 3], [0, 1], [(0, 2, "2.11"), (1, 3, "2.13")]),
        ([3, 3], [0, 1], [(0, 3, "2.11"), (1, 3, "2.13")]),
        ([3, 3], [0, 2], [(0, 3, "2.11"), (2, 3, "2.13")]),
    ],
)
def test_all_ranks_hear_the_same_of_everyone_who_came(
    processes: Processes, port: int, sizes: list[int], ranks: list[int], heard: list[tuple[int, int, str]]
) -> None:
    assert processes.run(2, roll_call_at, args=(port, sizes, ranks)) == [heard, heard]


@pytest.mark.processes
def test_ranks_that_nothing_launched_connect_after_the_roll_call(port: int) -> None:
    """The server that rank 0 opens for the roll call stays: else a rank may connect to it while it ends."""
    try:
        own = address_towards("192.0.2.1")  # of this machine, but not of the loopback interface
    except OSError:
        pytest.skip("this machine has no interface but loopback")
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": own, "MASTER_PORT": str(port)}
    words = ["meshwise", "doctor", "--seconds", "20"]
    ranks = [WarmCommand(*words, variables={**job, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    told = [rank.end() for rank in ranks]
    assert [status for status, *_ in told] == [0, 0], told


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("comm, medium", [("local", "shared memory"), ("gloo", "gloo")])
def test_local_ranks_that_can_communicate_end_with_status_0(
    comm: str, medium: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHWISE_COMM", comm)
    status = main(["doctor", "--ranks", "2"])

    text = capfd.readouterr().out
    assert f"2 ranks on cpu, joined by {medium}, communicate: 1 pair, median latency" in text
    assert (status, "all is well" in text) == (0, True)


@pytest.mark.processes
def test_one_rank_has_no_peer(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "1"]) == 0
    assert "1 rank on cpu: it exchanged no messages" in capfd.readouterr().out


def test_a_problem_ends_with_status_1_and_its_remedy(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ, {**JOB, "RANK": "1", "MASTER_PORT": str(port)}):
        status = main(["doctor", "--seconds", "0.3"])

    text = capsys.readouterr().out
    assert status == 1
    assert f"rank 1: nothing listens at 127.0.0.1:{port}" in text
    assert "start rank 0 on that machine first" in text


@pytest.mark.parametrize("words", [["--second", "1"], ["--seconds", "0"], ["--seconds", "-1"], ["--seconds", "nan"]])
def test_a_bad_flag_ends_with_status_2(words: list[str]) -> None:
    assert main(["doctor", *words]) == 2


SILENT_RANK = """
import time
from meshwise.bench.doctor import _exchange_in_time
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads

def main(world):
    time.sleep(60) if world.rank else _exchange_in_time(world, 0.5)

run_threads(2, main)
"""


@pytest.mark.processes
def test_an_exchange_that_hangs_is_ended_with_the_position() -> None:
    status, _, errors = WarmCommand("-c", SILENT_RANK).end()

    assert status == 1
    assert "made no progress for 0.5 s while exchanging messages at #0 send[rank] to 1 2 float32" in errors
    assert "GLOO_SOCKET_IFNAME" in errors
