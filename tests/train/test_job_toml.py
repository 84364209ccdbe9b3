"""A job from TOML and flags: what comes back, and the message for a mistake."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshwise.plan import Plan, PlanError
from meshwise.train.flags_and_toml import parse_flags, read_job, to_toml
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, SampleJob, StudiedJob, TrainJob


def job_of(*words: str) -> Job:
    return read_job(words, prog="meshwise train", kind=Job)


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


FULL = Job(
    model=ModelJob(
        "my.py:build",
        {"layers": 3, "widths": [1, 2], "name": "a b", "rate": 0.5, "on": True},
        {"blocks.*.qkv": "colwise sections=3"},
    ),
    data=DataJob(files=("a b.txt", "c/*.py"), context=7, validation=0.0, cache="/tmp/x"),
    optimizer=OptimizerJob("SGD", lr=3e-4, weight_decay=0.0, betas=(0.5, 0.75), arguments={"momentum": 0.9}),
    train=TrainJob(steps=3, seed=-1, clip_norm=0.5, nonfinite="skip:2", dtype="float64", noise=True),
    sample=SampleJob(length=4, prompt="-def \n\"f'"),
    plan=Plan(dp=2, zero=3, microbatches=2),
    loss="mse",
    ranks=2,
)


@pytest.mark.parametrize("job", [Job(), FULL], ids=["defaults", "everything"])
def test_a_job_is_written_and_read_back_as_it_was(job: Job, tmp_path: Path) -> None:
    path = write(tmp_path, to_toml(job))
    assert job_of(path) == job
    assert to_toml(read_job([path], prog="meshwise verify", kind=StudiedJob)) == to_toml(job)


def test_without_words_a_job_has_its_defaults() -> None:
    assert job_of() == Job()


def test_a_flag_wins_over_the_file_which_wins_over_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 5\nbatch = 6\n")

    job = job_of(path, "--train.steps", "7")

    assert (job.train.steps, job.train.batch, job.train.seed) == (7, 6, 0)


def test_a_flag_changes_one_argument_and_keeps_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, "[model.arguments]\nlayers = 2\nwidth = 64\n[optimizer.arguments]\neps = 0.5\n")

    job = job_of(path, "--model.arguments", "width=32", "positions=rotary")

    assert job.model.arguments == {"layers": 2, "width": 32, "positions": "rotary"}
    assert job.optimizer.arguments == {"eps": 0.5}


@pytest.mark.parametrize("plan", ['plan = "dp=2 zero=1"', "[plan]\ndp = 2\nzero = 1"])
def test_a_plan_is_a_line_or_a_table(plan: str, tmp_path: Path) -> None:
    assert job_of(write(tmp_path, plan)).plan == Plan(dp=2, zero=1)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--train.stepz", "3"], "unknown key train.stepz; did you mean train.steps?"),
        (["--train.lr=3"], "unknown key train.lr; did you mean optimizer.lr?"),
        (["--sead=3"], "unknown key sead; did you mean train.seed?"),
        (
            ["--model.layers=3"],
            "unknown key model.layers; give an argument of your own function as --model.arguments layers=…",
        ),
        (
            ["--model.arguments.layers=3"],
            "model.arguments is a table: give --model.arguments layers=…",
        ),
        (["--train.steps", "ten"], "--train.steps: not a whole number: 'ten'"),
        (["--train.steps"], "Missing value for argument '--train.steps'. Expected 1 values."),
        (["--ranks", "two"], "--ranks: no type matching {None}|INT could be instantiated from ['two']"),
        (
            ["--optimizer.betas", "0.9"],
            "--optimizer.betas: no type matching {None}|{FLOAT FLOAT} could be instantiated",
        ),
        (["--optimizer.lr", "high"], "--optimizer.lr: not a number: 'high'"),
        (
            ["--train.dtype", "float16"],
            "train.dtype = 'float16' is none of float32, float64; or give the plan",
        ),
        (
            ["--plan", "dp=2", "zero=1"],
            """unexpected 'zero=1'; flags begin with --, and a value with blanks is quoted, as in --plan "dp=2""",
        ),
        (["-plan", "dp=2"], "unexpected '-plan'; flags begin with --"),
        (["train.steps=3"], "cannot read the job train.steps=3"),
        (
            ["--train.steps=3", "job.toml"],
            "'job.toml' comes after a flag; name one job file, before all flags",
        ),
        (["--train.noise", "yes"], "unexpected 'yes'"),
        (["--train.steps", "0"], "train.steps = 0 has to be at least 1"),
        (["--train.clip-norm", "0"], "train.clip_norm = 0.0 has to be above 0"),
        (["--train.nonfinite", "skip"], "nonfinite='skip'; write 'raise', or 'skip:3'"),
        (["--data.validation", "1"], "data.validation = 1.0 is a fraction of the data"),
        (["--data.files"], "data.files is empty"),
        (["--schedule.floor", "2"], "schedule.floor = 2.0 is a fraction: from 0 to 1"),
        (
            ["--schedule.shape", "cosin"],
            "invalid choice 'cosin' for argument '--schedule.shape'. Expected one of ('constant', 'linear'",
        ),
        (["--model.arguments", "layers"], "'layers' is not KEY=VALUE; write it as in layers=4"),
        (["--plan", "dp=2 zro=1"], "unknown plan key 'zro'; did you mean zero?"),
        (["--plan", "tp=3 tp_mode=2d"], "works: 'tp=4'"),
        (["--ranks", "0"], "ranks = 0 has to be at least 1"),
        (["missing.toml"], "cannot read the job missing.toml: No such file"),
    ],
)
def test_a_wrong_flag_gets_one_message_that_says_what_to_change(words: list[str], message: str) -> None:
    with pytest.raises(JobError) as error:
        job_of(*words)

    assert message in str(error.value)
    assert "│" not in str(error.value)


def test_tensor_rules_are_patterns_and_parts() -> None:
    words = ("--model.tensor-rules", "blocks.*.qkv=colwise sections=3", "head=head")
    assert job_of(*words).model.tensor_rules == {"blocks.*.qkv": "colwise sections=3", "head": "head"}
    with pytest.raises(JobError, match=re.escape("'blocks.*.up' = 3 is not a role")):
        ModelJob(tensor_rules={"blocks.*.up": 3})


def test_every_wrong_key_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'plan = "dp=2 zro=1"\nsedd = 1\n[trian]\nsteps = 3\n[train]\nsteps = "ten"\nbatch = 0\n',
    )

    with pytest.raises(JobError) as error:
        job_of(path)

    assert str(error.value).splitlines() == [
        f"{path}: plan: unknown plan key 'zro'; did you mean zero?",
        f"{path}: unknown key sedd; did you mean train.seed?",
        f"{path}: unknown key trian.steps; did you mean train.steps?",
        f"{path}: train.steps: not a whole number: 'ten'",
        f"{path}: train.batch = 0 has to be at least 1",
    ]


def test_a_file_that_is_not_toml_says_where(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"job.toml is not TOML: .*line 2"):
        job_of(write(tmp_path, "ranks = 1\nthis is not TOML"))


def test_a_plan_in_a_job_is_checked_like_any_plan() -> None:
    with pytest.raises(PlanError):
        Job(plan=Plan.parse("tp=3 tp_mode=2d"))


def test_a_command_may_add_fields_of_its_own() -> None:
    @dataclasses.dataclass(frozen=True)
    class Longer(Job):
        twice: int = 1
        """A field of a command."""

    assert read_job(["--twice", "4", "--train.steps=2"], prog="x", kind=Longer).twice == 4


def test_help_shows_the_values_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        job_of(write(tmp_path, "[train]\nsteps = 4321\n"), "--help")

    assert end.value.code == 0
    assert "4321" in capsys.readouterr().out


def sections() -> list[Any]:
    hints = typing.get_type_hints(Job)
    return [Job, *(hint for hint in hints.values() if dataclasses.is_dataclass(hint) and hint is not Plan)]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_a_field_that_may_be_none_defaults_to_none(section: Any) -> None:
    # TOML has no null: any other default could not be undone in a file.
    for name, hint in typing.get_type_hints(section).items():
        if type(None) in typing.get_args(hint):
            assert getattr(section(), name) is None, name


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_says_what_it_is_for(section: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job_of("--help")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    prefix = next((name for name, hint in typing.get_type_hints(Job).items() if hint is section), None)

    for item in dataclasses.fields(section):
        if prefix is None and item.name not in ("plan", "loss", "ranks"):
            continue
        flag = "--" + ".".join(filter(None, [prefix, item.name])).replace("_", "-")
        after = re.split(rf"{re.escape(flag)}[ ,]", printed, maxsplit=1)[1].split("(default:", 1)[0]
        assert len(after.split()) > 3, flag


def test_ranks_that_are_threads_leave_stderr_as_it_was() -> None:
    stderr = sys.stderr
    with ThreadPoolExecutor(4) as pool:
        jobs = list(
            pool.map(lambda step: parse_flags([f"--train.steps={step}"], prog="x", default=Job()), range(1, 13))
        )
    assert [job.train.steps for job in jobs] == list(range(1, 13))
    assert sys.stderr is stderr


def test_a_switch_of_a_file_may_be_on_or_off(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nnoise = true\n")
    assert job_of(path).train.noise
    assert not job_of(path, "--train.no-noise").train.noise
    assert not job_of(write(tmp_path, "[train]\nnoise = false\n"), "--train.steps=2").train.noise
    with pytest.raises(JobError, match="noise"):
        job_of(write(tmp_path, '[train]\nnoise = "yes"\n'))


def test_python_writes_true_and_false_too() -> None:
    assert job_of("--model.arguments", "tied=True", "bias=False").model.arguments == {"tied": True, "bias": False}
