"""`meshwise train` as a user starts it: what it says, with which status it ends, and that no process is left.

What needs no process of its own is called in this one, whose ranks are forked from a server that is there already."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grid import Grid
from meshwise.cli.main import main
from meshwise.comm.api.world import World
from warm_command import WarmCommand
from warm_processes import Processes

pytestmark = pytest.mark.processes

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SMALL = ["--model.arguments", "layers=1", "width=32"]
SHORT = ["--train.steps=3", "--train.validate-batches=1", "--sample.length=8", *SMALL]
END_SECONDS = 200.0

OWN = """
import os, signal
from torch import nn

class Own(nn.Module):
    '''Predicts the next byte from this one, and misbehaves on rank 1 in its third step.'''

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.how == "raise":
                raise ArithmeticError("this model cannot count to three")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return self.head(self.embedding(tokens))
"""


class Command(WarmCommand):
    """A command in a session of its own, so that what it leaves behind can be found."""

    def until(self, text: str) -> None:
        """Read its lines up to the one that begins with `text`."""
        assert any(line.startswith(text) for line in self.stdout), f"it ended without {text!r}"

    def left(self) -> list[str]:
        """The processes of its session that do not end by themselves within seconds."""
        stop = time.monotonic() + END_SECONDS
        while (running := self.running()) and time.monotonic() < stop:
            time.sleep(0.1)
        return running

    def running(self) -> list[str]:
        """The processes of its session."""
        rows = subprocess.run(["ps", "-eo", "sess=,stat=,args="], capture_output=True, text=True, check=True).stdout
        split = [row.split(maxsplit=2) for row in rows.splitlines()]
        return [row[2] for row in split if row[0] == str(self.pid) and not row[1].startswith("Z")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


FILES = ["--data.cache=cache", "--train.output=run"]


def own(how: str) -> list[str]:
    """The words for training a model of the user's own on two ranks."""
    model = ["--model.name=own.py:Own", "--model.arguments", f"how={how}"]
    data = ["--data.files", "own.py", "--data.context=16", "--data.validation=0", "--train.batch=4"]
    return ["train", *model, *data, "--plan=dp=2 zero=2", "--train.log-every=1", *FILES]


def children() -> set[int]:
    """The processes that this one has, and those of the server from which ranks are forked."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=True).stdout
    split = [row.split(maxsplit=3) for row in rows.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in split if not row[2].startswith("Z") and row[3] != "ps"}
    own = {pid for pid, of in parents.items() if of == os.getpid()}
    return own | {pid for pid, of in parents.items() if of in own}


def size(world: World) -> int:
    return world.size


@pytest.fixture
def nothing_left(processes: Processes) -> Iterator[None]:
    """No process is left of what the test calls in this one."""
    processes.run(2, size)  # these stay, and so does the server that they are forked from
    before = children()
    yield
    stop = time.monotonic() + END_SECONDS
    while (left := children() - before) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not left


def steps(folder: Path) -> list[tuple[int, float]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


@pytest.mark.usefixtures("nothing_left")
def test_the_demo_trains_and_the_torchrun_line_it_prints_does_the_same(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["train", str(DEMO), "--plan=dp=2 zero=3", *SHORT, *FILES])
    out, err = capfd.readouterr()

    assert (status, err) == (0, "")
    assert "starting 2 local ranks" in out
    assert "dp │ 0  1" in out
    assert "the model writes:" in out
    assert f"next: meshwise verify {shlex.quote(f'{folder}/run/job.toml')}" in out
    assert {path.name for path in (folder / "run").iterdir()} == {"job.toml", "metrics.jsonl", "parameters.safetensors"}

    printed = next(line for line in out.splitlines() if line.strip().startswith("torchrun"))
    status, _, err = Command("forked_torchrun", *shlex.split(printed)[1:], folder=folder).end()

    assert status == 0, err
    assert steps(folder / "run-2") == steps(folder / "run")
    assert [step for step, _ in steps(folder / "run")] == [1, 2, 3]


@pytest.mark.usefixtures("nothing_left")
def test_a_model_that_raises_on_one_rank_is_one_message_and_its_traceback_is_in_the_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(own("raise")) == 1

    file = folder / "run" / "failure-rank-1.txt"
    line = 1 + OWN.splitlines().index(next(line for line in OWN.splitlines() if "ArithmeticError" in line))
    assert capfd.readouterr().err.splitlines() == [
        "meshwise train failed: ArithmeticError: this model cannot count to three",
        f"  raised on rank 1 of 2 at {folder}/own.py:{line} forward; the whole traceback is in {file}",
    ]
    assert file.read_text().startswith("Traceback")
    assert file.read_text().endswith("ArithmeticError: this model cannot count to three\n")
    assert [step for step, _ in steps(folder / "run")] == [1, 2], "what was done before is on disk"


def test_one_rank_that_raises_under_torchrun_is_told_and_nobody_is_said_to_disagree(folder: Path) -> None:
    words = ["--standalone", "--nproc-per-node=2", "-m", "meshwise", *own("raise")]
    status, _, err = Command("forked_torchrun", *words, folder=folder).end()

    assert status == 1
    assert "[rank 1] meshwise train failed: ArithmeticError: this model cannot count to three" in err
    assert err.count("meshwise train failed") == 1
    assert "called different collectives" not in err


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_is_killed_is_started_again_and_the_run_goes_on_until_that_helps_no_more(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*own("die"), "--restarts=1", "--train.steps=9", "--train.save-every=1"]) == 1

    out, err = capfd.readouterr()
    assert "--max-restarts=1" in out
    lost = "rank 1 of 2 ended without an exception, killed by SIGKILL"
    assert err.splitlines() == [
        f"meshwise: restart 1 of 1, because RankKilledError: {lost}",
        f"meshwise train failed: {lost}",
    ]
    assert f", from {folder}/run/checkpoints/step-" in out
    done = steps(folder / "run")
    last = max(dict(done))
    assert last >= 3, "each start trains for two steps more; what is on disk may be a step behind"
    assert sorted(dict(done)) == list(range(1, last + 1))
    assert len(set(done)) == last, "a step that was done twice had the same loss"


@pytest.mark.grid(
    Grid(
        {"how": ("SIGTERM to the launcher", "SIGINT to the session", "SIGUSR1 to a rank")},
        heavy=lambda cell: "SIGINT" in cell["how"],  # it saves as at SIGTERM, and ends as in the next test
    )
)
def test_a_signal_lets_all_ranks_save_and_end_and_the_printed_command_goes_on(how: str, folder: Path) -> None:
    words = [*own("nothing"), "--train.steps=1000000", "--train.save-every=1000000"]
    command = Command("meshwise", *words, folder=folder)
    command.until("step 2/")
    number = signal.Signals[how.split(maxsplit=1)[0]]
    if "launcher" in how:
        os.kill(command.pid, number)
    elif "session" in how:
        os.killpg(command.pid, number)  # Ctrl-C in a terminal
    else:
        rows = subprocess.run(["ps", "-eo", "sess=,pid="], capture_output=True, text=True, check=True).stdout
        pairs = [row.split() for row in rows.splitlines()]
        os.kill(max(int(pid) for session, pid in pairs if session == str(command.pid)), number)  # a rank
    status, out, _ = command.end()

    assert status == {"launcher": -signal.SIGTERM, "session": 130, "rank": 0}[how.rsplit(maxsplit=1)[-1]]
    assert not command.left()
    done = steps(folder / "run")
    [line] = [line for line in out.splitlines() if line.startswith("stopped")]
    assert line == f"stopped  after step {len(done)}, as {number.name} asked"
    assert [path.name for path in (folder / "run" / "checkpoints").glob("step-*")] == [f"step-{len(done)}"]
    following = shlex.split(out.partition("\nnext: ")[2].splitlines()[0])
    assert following[:2] == ["meshwise", "train"]
    assert main([*following[1:], f"--train.steps={len(done) + 2}"]) == 0
    assert [step for step, _ in steps(folder / "run")] == list(range(1, len(done) + 3))


def test_ctrl_c_ends_every_rank_with_status_130(folder: Path) -> None:
    words = [*own("nothing"), "--train.steps=1000000"]
    command = Command("meshwise", *words, folder=folder)
    command.until("step 2/")
    assert len(command.running()) >= 3, "the ranks are in the session that is searched for what is left"

    os.killpg(command.pid, signal.SIGINT)
    status, _, err = command.end()

    assert (status, err) == (130, "meshwise train: stopped by Ctrl-C\n")
    assert not command.left()
    assert steps(folder / "run"), "what was done before the step that was last printed is on disk"
