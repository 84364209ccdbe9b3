"""What differs between the job of a checkpoint and the job that goes on from it.

A resumed run is the same run only if the same things decide its numbers. Some keys only decide how the numbers are
computed or what is told about them; a new value of those is said and used. All others would make another run of it in
silence, and are refused until the user names them in `train.accept`. The text a run trains on is compared by its
content: the same file may lie elsewhere, and another may lie in its place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from meshwise.train.job import Job, JobError
from meshwise.train.job_config import to_toml

FREE = (
    "plan",
    "ranks",
    "restarts",
    "comm",
    "model.tensor_rules",
    "model.cut",
    "model.cut_at",
    "data.files",
    "data.workers",
    "data.cache",
    "swap",
    "sample",
    "predicted",
    "train.steps",
    "train.nonfinite",
    "train.log_every",
    "train.validate_every",
    "train.validate_batches",
    "train.tensorboard",
    "train.timeline",
    "train.save_every",
    "train.keep_last",
    "train.output",
    "train.resume",
    "train.accept",
)
"""Keys that do not decide the numbers of a run, or (steps) how far it goes; a section stands for its keys."""
_UNSAID = ("ranks", "restarts", "comm", "swap", "data.cache", "train.output", "train.resume", "train.accept")


def changes(saved: Mapping[str, Any], *, job: Job, content: str) -> list[str]:
    """Return a line for each difference from the job of the checkpoint.

    saved: the checkpoint's `job` (as TOML) and `content` (of its data). Raises JobError that names every key which
    would silently make it another run.
    """
    before, now = _flat(Job()) | _leaves(tomllib.loads(saved["job"])), _flat(job)
    differing = {key: (before.get(key), now.get(key)) for key in sorted({*before, *now})}
    differing = {key: values for key, values in differing.items() if values[0] != values[1]}
    told = {key: f"{key}: {_shown(was)} -> {_shown(is_now)}" for key, (was, is_now) in differing.items()}
    refused = {key: line for key, line in told.items() if not _within(key, (*FREE, *job.train.accept))}
    if saved["content"] != content:
        told["data"] = f"what the data hold: {saved['content']} -> {content}"
        if not _within("data", job.train.accept) and not _within("data.files", job.train.accept):
            refused["data"] = told["data"]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused.values())
        raise JobError(
            f"with these changes the run that is resumed would be another one:\n{lines}\n"
            f"take them back, or say that you mean them: --train.accept {' '.join(refused)}"
        )
    if "train.steps" in told and job.schedule.shape != "constant":
        told["train.steps"] += ", and the learning rate follows the new length"
    return [line for key, line in told.items() if not _within(key, _UNSAID)]


def _flat(job: Job) -> dict[str, Any]:
    return _leaves(tomllib.loads(to_toml(job)))


def _leaves(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table by dotted key."""

    def walk(part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(walk(table, ""))


def _within(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _shown(value: Any) -> str:
    return "(default)" if value is None else repr(value)
