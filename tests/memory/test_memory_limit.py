"""A model larger than the memory trains from disk; without disk it fails and names the cheapest plan that fits."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from memory.offloaded_model import Blocks, batches, squares
from meshwise.checkpoint.checkpoint_format import DamageError
from meshwise.cli import train_command as command
from meshwise.comm.api.launcher_info import RankKilledError
from meshwise.memory.malloc_options import is_out_of_memory
from meshwise.memory.swap_file import TierError
from meshwise.plan import Plan
from meshwise.simulate import predicted_memory as room
from meshwise.simulate.predicted_memory import MemoryNeeds, ShortageError, memory_advice
from meshwise.simulate.rehearsal import RehearsalSubject
from meshwise.train.console_output import SELF_EXPLAINING

ROOM = 88 * 2**20  # of which 3 or 4 are for what of it differs from run to run
pytestmark = pytest.mark.threads("its processes are its own, on the CPU")

JOB = """
[model]
arguments = {width = 320, layers = 5, heads = 4}
[data]
context = 32
files = ["words.txt"]
[train]
steps = 2
batch = 2
[swap]
megabytes = 4
"""
PARAMETERS = 5 * 12 * 320 * 320  # and a little: 16 bytes each are 94 MiB


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    tmp_path = tmp_path_factory.mktemp("limited")
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "words.txt").write_text("to be or not to be " * 500)
    # What is freed goes back to the system at once, and threads share one heap: what counts is what is in use.
    lean = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = [sys.executable, str(Path(__file__).with_name("limited_memory.py")), str(ROOM), "job.toml"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=tmp_path, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env={**os.environ, **lean}
    ) as running:
        yield running


def train(limited: subprocess.Popen[str], plan: str) -> tuple[str, int]:
    """What a run under a plan prints, and its status."""
    assert limited.stdin is not None
    assert limited.stdout is not None
    print(plan, file=limited.stdin, flush=True)
    told = list[str]()
    for line in limited.stdout:
        if ended := re.fullmatch(r"ended (\d+)\n", line):
            return "".join(told), int(ended[1])
        told.append(line)
    pytest.fail("".join(told))


def test_a_model_larger_than_the_memory_fails_with_a_plan_that_trains(
    limited: subprocess.Popen[str],
) -> None:
    died, status = train(limited, "dp=1")
    assert status == 3, died
    table = {row[0]: row[1] for row in re.findall(r"^  (\w[\w ]*?) {2,}([\d.]+) MiB", died, flags=re.MULTILINE)}
    states = sum(float(table[kind]) for kind in ("parameters", "gradients", "optimizer"))
    assert 16 * PARAMETERS < states * 2**20 < 1.1 * 16 * PARAMETERS
    assert float(table["in all"]) > float(table["room"])
    answer = re.search(r"the cheapest change that fits: '(.*)' \((.*) MiB\)", died)
    assert answer is not None, died
    assert "disk" in answer[1]
    assert float(answer[2]) < float(table["room"])
    trained, status = train(limited, answer[1])
    assert status == 0, trained
    assert "done: 2 steps" in trained


def test_an_out_of_memory_error_of_a_script_has_a_note(
    limited: subprocess.Popen[str],
) -> None:
    died, status = train(limited, "script dp=1")
    assert status == 1, died
    assert "allocate memory" in died
    listed = dict(re.findall(r"^  (\w+) +([\d.]+) MiB$", died, flags=re.MULTILINE))
    assert (listed["parameters"], listed["gradients"]) == ("24.0", "24.0"), died
    assert 'mw.needs(model, "dp=1", loss=loss, batch=batch)' in died
    answer, status = train(limited, "needs dp=1")
    assert status == 0, answer
    cheapest = re.search(r"the cheapest change that fits: '(.*)' \(", answer)
    assert cheapest is not None, answer
    fits, status = train(limited, f"needs {cheapest[1]}")
    assert fits.endswith("it fits\n"), fits


@pytest.mark.parametrize(
    "error, is_one",
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ShortageError("", used={}), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("shapes do not match"), False),
        (DamageError([]), False),
    ],
)
def test_what_is_a_shortage_of_memory(error: Exception, *, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_shortages_and_broken_disks_are_reported_without_a_traceback() -> None:
    assert {ShortageError, TierError} <= set(SELF_EXPLAINING)


def test_a_shortage_error_survives_pickling() -> None:
    sent = ShortageError("no memory", used={"parameters": 4})
    received = pickle.loads(pickle.dumps(sent))
    assert (type(received), str(received), received.used) == (ShortageError, "no memory", sent.used)


# ---- which plan --------------------------------------------------------------------------------------------------


class AnsweredNeeds(MemoryNeeds):
    """States of 64 bytes and activations of 64 a rank, less by what a plan shares out, recomputes or moves."""

    def of(self, plan: Plan) -> Mapping[str, int]:
        assert plan.dp is not None
        states = (64, 40, 28, 16)[plan.zero] if plan.dp > 1 else 64
        activations = 64 // plan.microbatches // {"none": 1, "selective": 2, "full": 16}[plan.recompute]
        return {"states": states // 4 if "disk" in plan.offload else states, "activations": activations}


@pytest.mark.parametrize(
    "plan, room, fitting",
    [
        ("dp=4", 127, "dp=4 zero=1"),
        ("dp=4", 92, "dp=4 zero=2"),
        ("dp=4", 79, "dp=4 zero=1 microbatches=2"),
        ("dp=4 zero=2", 79, "dp=4 zero=2 microbatches=2"),
        ("dp=4", 47, "dp=4 zero=1 recompute=full"),
        ("dp=1", 80, "dp=1 microbatches=4"),
        ("dp=1 microbatches=8", 71, "dp=1 microbatches=8 recompute=selective"),
        ("dp=1", 60, "dp=1 recompute=full offload=optimizer:disk,gradients:disk"),
        ("dp=1", 1, None),
    ],
)
def test_the_cheapest_plan_that_fits_has_the_lowest_zero_and_then_the_least_to_do(
    plan: str, room: int, fitting: str | None
) -> None:
    needs = AnsweredNeeds(RehearsalSubject(Blocks, squares, batches()[0]), ranks=4)
    found = memory_advice(needs, plan=Plan.parse(plan), room=room, used={})
    assert found.fitting == (fitting and Plan.parse(fitting))
    assert str(found).count("staging buffers (swap.megabytes") == (fitting is None)


class UnansweredNeeds(MemoryNeeds):
    def of(self, plan: Plan) -> Mapping[str, int]:  # noqa: ARG002
        raise RuntimeError("item() of a tensor without values")


def test_a_model_that_cannot_be_rehearsed_is_answered_with_its_measured_bytes() -> None:
    needs = UnansweredNeeds(RehearsalSubject(Blocks, squares, batches()[0]), ranks=1)
    message = str(memory_advice(needs, plan=Plan(), room=1024, used={"parameters": 2048}))
    assert re.search(
        r"parameters +2.0 KiB\n  room +1.0 KiB\n.* without values: item\(\) of a tensor without values$", message
    )


# ---- how much there is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own, folder, files",
    [
        ("0::/job/step", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu,cpuacct:/\n4:memory:/job/step\n0::/",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["second version", "first version"],
)
def test_nested_cgroups_limit_a_process_and_idle_page_cache_does_not_count(
    own: str, folder: str, files: tuple[str, str, str], tmp_path: Path
) -> None:
    most, now, idle = files

    def group(path: str, limit: str) -> None:
        (tmp_path / folder / path).mkdir(parents=True, exist_ok=True)
        for name, text in ((most, limit), (now, "60"), ("memory.stat", f"anon 3\n{idle} 20\n")):
            (tmp_path / folder / path / name).write_text(f"{text}\n")

    group("job", "100")
    group("job/step", "30")
    group("other", "1")
    assert list(room.cgroup_bytes_left(own, root=tmp_path)) == [0, 60]
    assert list(room.cgroup_bytes_left(own.replace("/job/step", "/outside"), root=tmp_path)) == []


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "kernel_counts", lambda _: {"MemAvailable": 100})
    monkeypatch.setattr(room, "_left_by_limits", lambda: iter(()))
    cpu = torch.device("cpu")
    assert room.room_left(cpu) == 100
    assert room.room_left(cpu, ranks=4, used=20) == (100 + 3 * 20) // 4


def test_without_a_limit_ranks_share_all_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "_OWN_GROUPS", tmp_path / "cgroup")
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert room.room_left(torch.device("cpu"), ranks=3) == everything // 3


@pytest.mark.parametrize("left, answered", [(1_300_000, True), (2_000_000, False)])
def test_killed_ranks_are_explained_if_the_plan_needs_more_memory_than_there_is(
    left: int, *, answered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise RankKilledError("rank 1 of 2 ended without an exception, killed by SIGKILL")

    monkeypatch.setattr(command, "run", killed)
    monkeypatch.setattr(command, "room_left", lambda *_, **__: left)
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("to be or not to be " * 500)
    Path("job.toml").write_text(JOB.replace("320", "64").replace("layers = 5", "layers = 1"))
    with pytest.raises(ShortageError if answered else RankKilledError, match="killed by SIGKILL") as told:
        command.main(["job.toml", "--plan", "dp=2"])
    assert ("the cheapest change that fits: 'dp=2 zero=1'" in str(told.value)) == answered
