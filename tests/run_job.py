"""Run a whole training job on some ranks, and return its summary and its output."""

from __future__ import annotations

import io

from rich.console import Console

from meshwise.comm.api.world import World
from meshwise.testing import run
from meshwise.train.job_settings import Job
from meshwise.train.loop import RunSummary, train


def run_job(job: Job, *, ranks: int = 2) -> tuple[RunSummary, str]:
    """What rank 0 returned, and what it said."""

    def main(world: World) -> tuple[RunSummary, str]:
        out = io.StringIO()
        return train(world, job=job, console=Console(file=out, width=200)), out.getvalue()

    returned: tuple[RunSummary, str] = run(ranks, main)[0]
    return returned
