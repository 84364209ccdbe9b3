"""`meshwise checkpoint`: what a user sees of checkpoints, and the status of each command."""

import json
import re
from pathlib import Path

import pytest
import torch

from meshwise.checkpoint.checkpoint_format import INDEX
from meshwise.cli.main import main
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.reference import next_token_loss
from meshwise.testing import run
from meshwise.train.flags_and_toml import to_toml
from meshwise.train.job_settings import DataJob, Job, ModelJob
from meshwise.train.objects_by_name import model_function

JOB = Job(
    model=ModelJob(name="gpt", arguments={"layers": 1, "heads": 2, "width": 8, "mlp_ratio": 2, "vocabulary": 12}),
    data=DataJob(context=8),
)


def save(world: World, root: Path) -> None:
    training = parallelize(model_function(JOB), "dp=2 zero=1", loss=next_token_loss, world=world, lr=1e-2)
    tokens = torch.arange(36).view(4, 9) % 12
    for step in (1, 2):
        training.step((tokens[:, :-1], tokens[:, 1:]))
        training.save(root / f"step-{step}", extra={"job": to_toml(JOB)} if step == 2 else {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run(2, save, args=(tmp_path / "run" / "checkpoints",))
    return tmp_path / "run" / "checkpoints"


def tear(folder: Path) -> None:
    with (folder / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"?")


def test_list_shows_the_checkpoints_of_a_run_newest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(root.parent)]) == 0
    _, newest, older = capsys.readouterr().out.strip().splitlines()
    assert newest.split()[0] == "step-2"
    assert newest.rstrip().endswith("latest")
    assert "dp=2 zero=1" in newest
    assert older.split()[0] == "step-1"


def test_list_names_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2" / "rank-00000.safetensors").unlink()
    assert main(["checkpoint", "list", str(root)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_show_tells_every_tensor_and_what_else_was_saved(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(root / "step-2")]) == 0
    printed = capsys.readouterr().out
    for word in ("parameter/", "optimizer/exp_avg/", "scalar/step/", "float32", "dp=2 zero=1", "parameters", "[model]"):
        assert word in printed


def test_check_reads_every_byte_of_one_or_of_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "check", str(root)]) == 0
    tear(root / "step-2")
    capsys.readouterr()
    assert main(["checkpoint", "check", str(root)]) == 1
    printed = capsys.readouterr().out
    assert "step-1: whole" in printed
    assert "rank-00001.safetensors" in printed
    assert "expected the crc32" in printed
    assert main(["checkpoint", "check", str(root / "step-1")]) == 0
    assert main(["checkpoint", "check", str(root / "step-2")]) == 1


def test_export_says_that_it_has_checked(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(root / "step-2"), str(tmp_path / "out")]) == 0
    assert "logits" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert main(["checkpoint", "export", str(root / "step-1"), str(tmp_path / "other")]) == 2
    assert "--job" in capsys.readouterr().err
    (tmp_path / "job.toml").write_text(to_toml(JOB))
    assert main(["checkpoint", "export", str(root / "step-2"), str(tmp_path / "out")]) == 2
    assert "out/model.safetensors exists and is not replaced" in capsys.readouterr().err
    words = ["export", str(root / "step-1"), str(tmp_path / "other"), "--job", str(tmp_path / "job.toml")]
    assert main(["checkpoint", *words]) == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_dcp_goes_out_and_in_and_a_job_goes_on(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back, step = tmp_path / "out", tmp_path / "back", root / "step-2"
    assert main(["checkpoint", "export", str(step), str(out), "--format", "dcp", "--merge"]) == 2
    assert "leave out --merge" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(step), str(out), "--format", "dcp"]) == 0
    assert capsys.readouterr().out.split() == [str(out / ".metadata"), str(out / "__0_0.distcp")]
    assert main(["checkpoint", "export", str(step), str(out), "--format", "dcp"]) == 2
    assert "exists and is not replaced; name another folder" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(out), str(back)]) == 0
    assert "after 2 steps" in capsys.readouterr().out
    assert main(["checkpoint", "import", str(root), str(back)]) == 1
    assert "expected a folder of torch.distributed.checkpoint" in capsys.readouterr().err

    (tmp_path / "text").write_bytes(bytes(range(12)) * 100)
    data = ["--data.files", str(tmp_path / "text"), "--data.context=8", f"--data.cache={tmp_path}"]
    words = ["train", "--model.arguments", "layers=1", "heads=2", "width=8", *data, "--train.batch=4", "--plan=dp=1"]
    folder = tmp_path / "trained"
    assert main([*words, "--train.steps=2", "--train.save-every=2", f"--train.output={folder}"]) == 0
    assert main(["checkpoint", "export", str(folder / "checkpoints" / "step-2"), str(out) + "2", "--format=dcp"]) == 0
    assert main(["checkpoint", "import", str(out) + "2", str(back) + "2", "--format=dcp"]) == 0
    assert main([*words, "--train.steps=3", f"--train.resume={back}2", f"--train.output={tmp_path / 'again'}"]) == 0
    events = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [3]


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "check", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"no checkpoint in {tmp_path}\n", "")
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "mend", str(tmp_path)])
    assert caught.value.code == 2


@pytest.mark.parametrize("words", ["list GONE", "show GONE", "check GONE", "export GONE out", "list FILE"])
def test_a_folder_that_is_not_there_is_one_message_on_stderr_and_status_2(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = (
        word.replace("GONE", str(tmp_path / "gone")).replace("FILE", str(tmp_path / "file")) for word in words.split()
    )
    assert main(["checkpoint", *given]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(
        r"meshwise checkpoint: .*(gone is not there|file is a file); name a run or its checkpoints\n", err
    )


@pytest.mark.parametrize("words", ["show ONE", "export ONE out"])
def test_damage_is_told_on_stderr_with_status_1(words: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2" / INDEX).unlink()
    assert main(["checkpoint", *(word.replace("ONE", str(root / "step-2")) for word in words.split())]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err == (
        f"meshwise checkpoint: damaged checkpoint:\n  {root / 'step-2' / INDEX}: "
        "expected the index of a checkpoint, found no such file\n"
    )


def test_a_checkpoint_without_its_index_is_listed_and_checked_as_damaged(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step-2" / INDEX).unlink()
    for words in ("list", "check"):
        assert main(["checkpoint", words, str(root)]) == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert "expected the index of a checkpoint, found no such file" in printed
        assert "step-1" in printed


@pytest.mark.parametrize("words", ["show RUN", "export RUN into"])
def test_a_run_in_place_of_a_checkpoint_is_told_its_checkpoints(
    words: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *(word.replace("RUN", str(root.parent)) for word in words.split())]) == 2
    message = capsys.readouterr().err
    assert "damaged" not in message
    assert f"{root / 'step-2'}, {root / 'step-1'}" in message
