"""`meshwise draw cut`: the stages that a job's model would be cut into, before any rank is started."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

from meshwise.cli.drawing_output import drawing_board
from meshwise.cli.rank_count import local_ranks
from meshwise.engine.cut_agreement import CutExample, cut_source, plan_schedule
from meshwise.model.deferred_init import build_with_values
from meshwise.model.forward import default_forward
from meshwise.train.job import JobError, StudiedJob
from meshwise.train.job_config import read_job
from meshwise.train.prepare import prepare


def main(words: Sequence[str]) -> int:
    """Print the cut of the job that the words describe. Raises JobError or PlanError where the job itself would."""
    job = read_job(words, prog="meshwise draw cut", kind=StudiedJob)
    prepared = prepare(job, ranks=local_ranks(job))
    plan = prepared.job.plan
    if plan.pp == 1:
        raise JobError(f"the plan '{plan}' has one stage; give one with pp, as in --plan 'pp=4 microbatches=8'")
    source = build_with_values(prepared.model, seed=job.train.seed)
    source.buffers()
    rows = default_collate([prepared.data.train[0]] * job.train.batch)
    example = CutExample(rows, default_forward, job.model.where)
    cut = cut_source(source, plan=plan, schedule=plan_schedule(plan), example=example, device=torch.device("cpu"))
    drawing_board().print(str(cut), highlight=False, markup=False, soft_wrap=True)
    return 0
