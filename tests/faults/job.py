"""The job that the campaign harms: small, fast, the same numbers in every run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from meshwise.plan import Plan
from meshwise.train.job_settings import DataJob, Job, ModelJob, OptimizerJob, ScheduleJob, TrainJob

STEPS = 10
RANKS = 2
SHAPE = {"layers": 1, "width": 16, "heads": 2, "tied": True, "dropout": 0.1}
NUMBERS = ("loss", "grad_norm", "lr", "tokens")

Events: TypeAlias = list[Mapping[str, Any]]
Numbers: TypeAlias = dict[int, tuple[Any, ...]]
"""By step, what was computed in it."""


def small_job(folder: Path, *, plan: str) -> Job:
    """A run of ten steps over a short text in `folder`, a checkpoint after every step."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return Job(
        model=ModelJob("gpt", SHAPE),
        data=DataJob(files=(str(text),), context=16, validation=0.0, cache=str(folder / "cache")),
        optimizer=OptimizerJob(lr=1e-2),
        schedule=ScheduleJob("cosine", warmup=2),
        train=TrainJob(
            steps=STEPS,
            batch=4,
            clip_norm=1.0,
            save_every=1,
            keep_last=4,
            output=str(folder / "run"),
            resume="auto",
        ),
        plan=Plan.parse(plan),
    )


def in_folder(job: Job, folder: Path) -> Job:
    """The same job with its run in another folder."""
    return dataclasses.replace(job, train=dataclasses.replace(job.train, output=str(folder)))


def starts(folder: Path) -> list[int]:
    """The lines with which the starts of a run begin what they have written."""
    return [number for number, line in enumerate(_lines(folder)) if line.startswith(b'{"event": "start"')]


def events(folder: Path) -> Events:
    """What the last start of a run has written, less a line that it left unfinished. Earlier lines may be damaged."""
    begun = starts(folder)
    return [json.loads(line) for line in _lines(folder)[begun[-1] : -1]] if begun else []


def _lines(folder: Path) -> list[bytes]:
    path = folder / "metrics.jsonl"
    return path.read_bytes().split(b"\n") if path.exists() else [b""]


def numbers(said: Events) -> Numbers:
    """The numbers of the steps among these events."""
    return {event["step"]: tuple(event[key] for key in NUMBERS) for event in said if event["event"] == "step"}
