"""Warm processes: a rank that fails, hangs or dies is reported, and no process is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

import warm_processes as processes
from meshwise.comm.api.world import World
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SECONDS = 200.0
"""A generous limit for what takes a moment on an idle machine."""


def total(world: World, start: float) -> tuple[int, float, torch.Tensor]:
    x = torch.tensor([start + world.rank])
    world.all_reduce(x, axes=world.mesh.names).wait()
    return os.getpid(), float(x), torch.rand(2)


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise KeyError("rank one has no such key")
    world.barrier()


def hang_on_one(world: World) -> None:
    if world.rank == 1:
        sleep_for_a_minute(world)
    world.barrier()


def sleep_for_a_minute(world: World) -> None:
    world.barrier()
    time.sleep(60)


def die_on_one(world: World) -> None:
    if world.rank == 1:
        print("the last output of rank one", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def speak(world: World) -> None:
    print(f"rank {world.rank} says hello")


@pytest.fixture(scope="module")
def crew() -> Iterator[Processes]:
    with Processes(timeout=SECONDS) as crew:
        yield crew


def pids(crew: Processes) -> list[int]:
    return [pid for pid, _, _ in run(2, total, on=crew, args=(0.0,))]


def gone(pid: int) -> bool:
    """Return whether a process has ended, or only waits for its parent to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, before it was read
        return True


def test_no_other_program_can_take_the_port_of_the_rendezvous(crew: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[int]()

    class Preceded(processes._Rank):
        def __init__(self, number: int, size: int, port: int, device: str) -> None:
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            tried.append(port)
            super().__init__(number, size, port, device)

    monkeypatch.setattr(processes, "_Rank", Preceded)
    crew.close()
    pids(crew)
    assert len(tried) == 2


def test_a_job_returns_what_each_rank_returned_and_the_ranks_can_talk(crew: Processes) -> None:
    results = run(2, total, on=crew, args=(0.5,))
    assert [value for _, value, _ in results] == [2.0, 2.0]


def test_the_processes_stay_between_calls_and_are_seeded_equally(crew: Processes) -> None:
    first, second = (run(2, total, on=crew, args=(0.0,)) for _ in range(2))
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(first, second, strict=True))
    assert os.getpid() not in pids(crew)


def test_what_the_ranks_print_is_printed_here_by_rank(crew: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, speak, on=crew)
    run(2, speak, on=crew)
    assert capsys.readouterr().out == 2 * "rank 0 says hello\nrank 1 says hello\n"


def test_a_function_that_cannot_be_imported_is_refused_and_nothing_is_lost(crew: Processes) -> None:
    before = pids(crew)

    def inner(world: World) -> None: ...

    with pytest.raises(ValueError, match=r"inner of .* cannot be imported by another process"):
        run(2, inner, on=crew)
    assert pids(crew) == before


def test_an_error_arrives_in_its_own_type_with_the_rank_and_its_traceback_and_ends_the_processes(
    crew: Processes,
) -> None:
    before = pids(crew)
    with pytest.raises(KeyError, match="rank one has no such key") as caught:
        run(2, fail_on_one, on=crew)
    note = "\n".join(caught.value.__notes__)
    assert "on rank 1 of 2 processes" in note
    assert "in fail_on_one" in note
    assert all(gone(pid) for pid in before)


def test_a_rank_that_ends_is_named_with_its_last_output(crew: Processes) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 processes ended by signal SIGKILL") as caught:
        run(2, die_on_one, on=crew)
    assert "the last output of rank one" in "\n".join(caught.value.__notes__)


def test_a_hanging_rank_is_named_with_its_stack_and_the_next_job_gets_new_processes(crew: Processes) -> None:
    before = pids(crew)
    wait = connection.wait

    def until_one_answers(pipes: list[Any], seconds: float) -> list[Any]:
        return wait(pipes, SECONDS if len(pipes) == 2 else seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "timeout", 1.0)
        patch.setattr(connection, "wait", until_one_answers)
        patch.setattr(processes, "_GRACE_SECONDS", 3.0)
        with pytest.raises(TimeoutError, match=r"no answer in 1 s from rank 1 of 2 .*:hang_on_one") as caught:
            run(2, hang_on_one, on=crew)
    assert "in sleep_for_a_minute" in "\n".join(caught.value.__notes__)
    assert all(gone(pid) for pid in before)
    assert not set(before) & set(pids(crew))


def test_closing_ends_all_processes(crew: Processes) -> None:
    before = pids(crew)
    crew.close()
    crew.close()
    assert all(gone(pid) for pid in before)


def test_the_crew_whose_last_job_is_longest_ago_ends_if_there_would_be_too_many_processes() -> None:
    with Processes(timeout=SECONDS, most=4) as few:
        single, pair, again, three = ([pid for pid, _, _ in run(n, total, on=few, args=(0.0,))] for n in (1, 2, 1, 3))
        assert again == single
        assert all(map(gone, pair))
        assert not any(map(gone, (*single, *three)))


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from meshwise.testing import run\n"
        "from warm_processes import Processes\n"
        "def main(world):\n"
        "    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    crew = Processes()\n"
        "    print(*run(2, main, on=crew), flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    starter = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        numbers = [int(word) for word in starter.stdout.readline().split()]
        assert len(numbers) == 2
        starter.kill()
    deadline = time.monotonic() + SECONDS
    while not all(gone(pid) for pid in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
