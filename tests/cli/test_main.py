"""The command `meshwise`: what it answers, and with which status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.cli.main import COMMANDS, main
from meshwise.cli.shared_flags import local_ranks
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.plan import Plan
from meshwise.train.job_settings import Job


def test_without_a_command_it_tells_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    alone = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone
    assert set(COMMANDS) <= set(alone.split())


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"meshwise \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "meshwise: unknown command 'trian'; did you mean train?\n"


def test_help_of_a_command_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])

    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "meshwise train [JOB.toml]" in printed
    assert "--restarts" in printed


@pytest.mark.parametrize("words", ["doctor", "bench collectives", "bench calibrate"])
def test_no_ranks_are_not_the_default(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--ranks", "0"]) == 2
    assert "ranks = 0 has to be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "simulate", "plan"])
def test_a_command_that_does_not_train_offers_no_restarts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    printed = capsys.readouterr().out
    assert "--train.steps" in printed
    assert "--restarts" not in printed


OUTPUTS = """
import json, os, sys
from pathlib import Path
from meshwise.cli.main import main

def ended(name, words, *, to=None, encoding="utf-8"):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if to is not None:
        os.dup2(to, 1)
        os.dup2(os.open(f"{name}.errors", os.O_WRONLY | os.O_CREAT), 2)
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    sys.argv = ["meshwise", *words]
    sys.exit(main())  # and Python ends as it does

drawn = ["draw", "mesh", "--plan=tp=2"]
statuses = {"closed": ended("closed", drawn), "closed, misspelled": ended("closed, misspelled", ["trian"])}
reading, broken = os.pipe()
os.close(reading)
statuses |= {
    "broken": ended("broken", drawn, to=broken),
    "full": ended("full", drawn, to=os.open("/dev/full", os.O_WRONLY)),
    "ascii": ended("ascii", drawn, to=os.open("ascii.output", os.O_WRONLY | os.O_CREAT), encoding="ascii"),
}
Path("statuses.json").write_text(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder of what the command said to outputs that go wrong, and with which status it ended each time.

    Each is a fork of one process that has imported the command, so that Python ends there as it always does; that one
    was started with closed outputs."""
    folder = tmp_path_factory.mktemp("outputs")
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", OUTPUTS]
    ended = subprocess.run(command, capture_output=True, check=False, cwd=folder)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    return folder, json.loads((folder / "statuses.json").read_text())


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(outputs: tuple[Path, dict[str, int]]) -> None:
    folder, statuses = outputs
    assert (statuses["broken"], (folder / "broken.errors").read_bytes()) == (141, b"")


def test_a_full_disk_under_what_it_says_is_one_message(outputs: tuple[Path, dict[str, int]]) -> None:
    folder, statuses = outputs
    said = (folder / "full.errors").read_text()
    assert (statuses["full"], said) == (1, "meshwise: cannot write the answer: No space left on device\n")


def test_an_output_that_lacks_characters_is_no_error(outputs: tuple[Path, dict[str, int]]) -> None:
    folder, statuses = outputs
    assert (statuses["ascii"], (folder / "ascii.errors").read_bytes()) == (0, b"")
    found = (folder / "ascii.output").read_bytes()
    assert found
    assert found.isascii()


def test_who_closes_its_output_hears_nothing(outputs: tuple[Path, dict[str, int]]) -> None:
    assert (outputs[1]["closed"], outputs[1]["closed, misspelled"]) == (0, 2)


SMALL = ["--train.batch=4", "--data.context=16", "--model.arguments", "layers=1", "width=32", "heads=2"]
BAD_JOBS = {
    "unknown key": (["--train.stepz=3"], "unknown key train.stepz; did you mean train.steps?"),
    "wrong type": (["--train.steps=many"], "--train.steps: not a whole number: 'many'"),
    "missing job": (["nowhere.toml"], "cannot read the job nowhere.toml: No such file or directory"),
    "wrong degree": (["--plan=dp=3", "--ranks=4"], "the plan 'dp=3' needs 3 ranks, but the world has 4"),
    "plan that cannot be": (["--plan=tp=3 tp_mode=2d"], "needs a square number of ranks. Nearest that works: 'tp=4'"),
    "unknown plan key": (["--plan=db=2"], "unknown plan key 'db'; did you mean dp?"),
    "missing file": (["--data.files", "nowhere.txt"], "data.files: 'nowhere.txt' is neither a file"),
    "empty data": (["--data.files", "blank.txt"], "all 1 files are empty"),
    "too little data": (["--data.files", "short.txt"], "hold 6 bytes, but a sample takes data.context + 1 = 257"),
    "small batch": (["--train.batch=3", "--plan=dp=4"], "3 samples cannot be shared by the 4 replicas of 'dp=4'"),
    "more than the data": (
        ["--train.batch=99"],
        "train.batch = 99 samples, but the training data has only 8: a step would",
    ),
    "micro-batches of none": (["--train.batch=4", "--plan=dp=2 microbatches=3"], "or at most microbatches=2"),
    "too many stages": ([*SMALL, "--plan=pp=20"], "20 stages do not fit: GPT has 8 pieces"),
    "heads that do not divide": (
        [*SMALL, "--plan=tp=3"],
        "'tp=3' can neither divide nor replicate evenly over 3 ranks. Nearest",
    ),
    "vocabulary": (
        ["--model.arguments", "vocabulary=99", "--train.batch=4"],
        "vocabulary=99 is less than 256",
    ),
    "context": (["--model.arguments", "context=99", "--train.batch=4"], "context=99 is less than data.context = 256"),
    "dataset": (["--data.dataset=own.py"], "data.dataset = 'own.py' is no 'module:function', as in 'my_module:own'"),
    "unknown model": (["--model.name=gtp"], "model.name = 'gtp' is neither 'gpt', 'mixture', 'mlp'"),
    "wrong shape": (["--model.arguments", "heads=3"], "width=128 must be a multiple of heads=3"),
    "unknown optimizer": (["--optimizer.name=Adamw"], "'Adamw' is no class of torch.optim; did you mean 'AdamW'?"),
    "unknown argument": (
        ["--model.arguments", "layer=3"],
        "model.arguments of gpt: unknown key layer; did you mean la",
    ),
}


@pytest.mark.parametrize("words, message", BAD_JOBS.values(), ids=BAD_JOBS.keys())
def test_a_bad_job_is_one_message_and_status_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    files = [] if "--data.files" in words else ["--data.files", "text.txt"]
    (tmp_path / "text.txt").write_text("text " * 500)

    status = main(["train", *words, *files, "--data.cache=cache", "--train.output=run"])

    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("meshwise train: ")
    assert captured.out == ""
    assert not (tmp_path / "run").exists()


def test_a_loss_that_returns_no_count_is_one_message_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "meshwise.cli.train_command.run", lambda size, main, args, **_: run_threads(size, main, args=args)
    )
    (tmp_path / "text.txt").write_text("text " * 500)
    (tmp_path / "own.py").write_text("def mean(output, batch):\n    return output.mean()\n")
    model = ["--model.arguments", "layers=1", "width=32", "--data.context=16", "--data.files", "text.txt"]

    status = main(["train", *model, "--loss=own.py:mean", "--plan=dp=2", "--data.cache=cache", "--train.output=run"])

    [line] = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("meshwise train: loss returned a float32 tensor of shape (); it must return (sum, count)")


@pytest.mark.parametrize(
    "plan, asked, cores, expected",
    [
        ("dp=3", None, 8, 3),
        ("dp=auto", None, 8, 4),
        ("dp=auto", None, 2, 2),
        ("dp=auto", 7, 2, 7),
        ("dp=2", 5, 8, 5),
    ],
)
def test_the_ranks_are_those_asked_for_or_what_the_plan_needs(
    plan: str, asked: int | None, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)  # of the machine
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("sys.platform", "linux")

    assert local_ranks(Job(plan=Plan.parse(plan), ranks=asked)) == expected


def test_under_torchrun_the_ranks_are_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    assert local_ranks(Job(plan=Plan(dp=2), ranks=3)) == 6


RUNS = ["train", "verify", "bench collectives", "bench calibrate", "simulate --memory --measure"]


@pytest.mark.parametrize("command", [*RUNS, "simulate --memory"])
def test_a_launcher_that_is_set_up_by_half_is_one_message_and_status_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert main(command.split()) == 2

    out, err = capsys.readouterr()
    name = command.split(maxsplit=1)[0]
    assert out == ""
    assert err.startswith(
        f"meshwise {name}: WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT; start the ranks"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize(
    "variable, message",
    [
        (
            "MESHWISE_COMM=mpi",
            "MESHWISE_COMM=mpi is unknown; the ways to connect the ranks of one host are auto, local, gloo",
        ),
        ("MESHWISE_STALL_SECONDS=soon", "MESHWISE_STALL_SECONDS=soon: it has to be a number of seconds above 0"),
    ],
)
def test_an_environment_that_asks_for_what_there_is_not_is_one_message_and_status_2(
    command: str,
    variable: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(*variable.split("="))

    assert main(command.split()) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"meshwise {command.split(maxsplit=1)[0]}: {message}")
    assert err.count("\n") == 1
