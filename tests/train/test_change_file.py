"""A job's file is changed in a few keys, and keeps everything else that its author wrote."""

import os
import tomllib
from pathlib import Path

import pytest

from meshwise.train.flags_and_toml import change_file
from meshwise.train.job_settings import JobError

JOB = """\
# the job of the week
loss = "mse"
plan = "dp=2"  # for now

[model]
name = "gpt"   # ours

[train]
batch = 8
"""


def test_keys_are_set_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    change_file(
        path,
        changes={
            ("plan",): "dp=4 pp=2",
            ("model", "cut_at"): ["blocks.1"],
            ("swap", "buffers"): 5,
            ("swap", "megabytes"): 12,
        },
    )
    assert path.read_text() == (
        '# the job of the week\nloss = "mse"\nplan = "dp=4 pp=2"  # for now\n\n'
        '[model]\nname = "gpt"   # ours\ncut_at = ["blocks.1"]\n\n'
        "[train]\nbatch = 8\n\n[swap]\nbuffers = 5\nmegabytes = 12\n"
    )
    change_file(path, changes={("model", "cut_at"): None, ("swap", "buffers"): 4})
    job = tomllib.loads(path.read_text())
    assert job["model"] == {"name": "gpt"}
    assert job["swap"] == {"buffers": 4, "megabytes": 12}
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_over_several_lines_is_one_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\ncut_at = [\n  "a",\n  "b",\n]\nname = "gpt"\n')
    change_file(path, changes={("plan",): "dp=2", ("model", "cut_at"): ["c"]})
    assert tomllib.loads(path.read_text()) == {"plan": "dp=2", "model": {"cut_at": ["c"], "name": "gpt"}}


def test_a_link_leads_to_the_changed_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text(JOB)
    (tmp_path / "job.toml").symlink_to(tmp_path / "jobs" / "job.toml")
    change_file(tmp_path / "job.toml", changes={("plan",): "dp=8"})
    assert (tmp_path / "job.toml").is_symlink()
    assert tomllib.loads((tmp_path / "jobs" / "job.toml").read_text())["plan"] == "dp=8"


def test_a_file_that_may_not_be_written_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    monkeypatch.setattr(os, "access", lambda place, _mode: place != path)
    with pytest.raises(JobError, match=r"cannot write .*job\.toml: it is read-only; it is unchanged"):
        change_file(path, changes={("plan",): "dp=8"})
    assert path.read_text() == JOB


def test_a_key_of_an_inline_table(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = { name = "gpt" }\n')
    change_file(path, changes={("model", "cut_at"): ["c"]})
    assert tomllib.loads(path.read_text()) == {"model": {"name": "gpt", "cut_at": ["c"]}}
