"""`meshwise verify`: the status says whether the plan is the same model, the text says where it is not."""

from pathlib import Path

import pytest

from meshwise.cli.main import main

JOB = """
plan = "dp=2 zero=1"
[model]
name = "gpt"
arguments = {layers = 1, width = 8, heads = 2}
[data]
files = ["text.txt"]
context = 4
[train]
batch = 5
clip_norm = 0.1
"""

MEAN_OF_MEANS = """
from torch.nn import functional

def loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()), 1
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWISE_STALL_SECONDS", "60")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("It is a truth universally acknowledged. " * 20)
    Path("job.toml").write_text(JOB)


def test_a_sound_plan_has_status_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "job.toml", "--comm=threads", "--plan=dp=3 zero=2 microbatches=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("dp=3 zero=2 microbatches=2 is the same model as one process (at most ")
    assert "3 x cpu, 3 steps, bound 1e-09" in text
    assert "blocks.0.attention.qkv.weight" in text


def test_steps_and_dtype_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "job.toml", "--comm=threads", "--steps=1", "--dtype=float32"]) == 0
    assert "2 x cpu, 1 step, bound max(16 eps" in capsys.readouterr().out


def test_a_loss_that_is_a_mean_of_means_has_status_1_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mean_of_means.py").write_text(MEAN_OF_MEANS)
    assert main(["verify", "job.toml", "--comm=threads", "--loss=mean_of_means.py:loss"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("dp=2 zero=1 is NOT the same model as one process")
    assert "first to differ: the count of the loss, in step 1" in text


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--plan=dp=2 zero=9"], "zero=9"),
        (["--plan=dp=8"], "train.batch = 5 samples cannot be shared by the 8 replicas"),
        (["--steps=0"], "steps = 0 has to be at least 1"),
        (["--dtype=float16"], "float16"),
        (["--model.name=nothing"], "model.name = 'nothing'"),
    ],
)
def test_a_bad_job_has_status_2_and_one_message(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "job.toml", "--comm=threads", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.processes
def test_processes_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "job.toml", "--steps=1"]) == 0
    text = capsys.readouterr().out
    assert "torchrun --standalone --nproc-per-node=2 -m meshwise verify job.toml --steps=1" in text
    assert "dp=2 zero=1 is the same model as one process" in text
