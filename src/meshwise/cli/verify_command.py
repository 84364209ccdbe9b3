"""The command `meshwise verify`: compare a plan with one process, for the model, data and optimizer of a job.

The exit status is 0 when both are the same model, else 1.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from meshwise.cli.flag_values import checked_comm, local_ranks
from meshwise.comm.api.launch_environment import is_rank, prints_for_job
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_world import run_threads
from meshwise.comm.launch.launch import run, torchrun_line
from meshwise.train.console_output import OutputConsole, counted, text_table
from meshwise.train.failure_report import leave_traceback
from meshwise.train.job import JobError, StudiedJob
from meshwise.train.job_toml import read_job
from meshwise.train.prepare_job import check_plan, prepare
from meshwise.verify import Report, verify

_MOST_ROWS = 40
_STALL_SECONDS = "3600"


@dataclass(frozen=True)
class VerifyJob(StudiedJob):
    """A training job. Some of its steps run under the plan and on one process, and are compared."""

    steps: int = 3
    """Optimizer steps to compare, on the first batches of the job, at its peak learning rate."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Element type of the parameters, in place of train.dtype. In float64 the relative difference may be 1e-9;
    otherwise what rounding explains, which is measured."""
    comm: Literal["auto", "local", "gloo", "threads"] = "auto"  # type: ignore[assignment] # one way more than training
    """How the ranks communicate: as in training, or with `threads` as threads of this process, which start faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise JobError(f"steps = {self.steps} has to be at least 1")


def main(arguments: Sequence[str]) -> int:
    """Verify the job that the arguments describe. Raises JobError or PlanError before any rank is started."""
    job = read_job(arguments, prog="meshwise verify", kind=VerifyJob)
    size, comm = local_ranks(job), checked_comm(job.comm)
    prepared = prepare(job, ranks=size)
    if not is_rank():
        check_plan(prepared)
    # The other ranks wait while rank 0 takes whole steps of the reference run: that is no hang.
    os.environ.setdefault("MESHWISE_STALL_SECONDS", _STALL_SECONDS)
    if is_rank() or job.comm != "threads":
        if not is_rank():
            print(f"starting {counted(size, of='local rank')}; the same with torchrun:")
            print(f"  {torchrun_line(size, ['-m', 'meshwise', 'verify', *arguments])}", flush=True)
        report: Report = run(size, _rank, args=(job,), comm=comm)[0]
    else:
        report = run_threads(size, _rank, args=(job,), timeout=None)[0]
    if prints_for_job():
        print_report(report, console=OutputConsole())
    return 0 if report.ok else 1


def print_report(report: Report, *, console: OutputConsole) -> None:
    """Print a report: the verdict, the steps, and the parameters that are furthest from their bounds."""
    console.print(report.verdict, style="bold green" if report.ok else "bold red", soft_wrap=True, highlight=False)
    lines = [report.setting, *report.notes, *([] if report.first is None else [str(report.first)])]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False, end="\n\n")
    console.show(text_table(report.step_rows(), failed="!"))
    console.print()
    worst = sorted(report.parameters, key=lambda line: -line.excess)[:_MOST_ROWS]
    shown = [line for line in report.parameters if line in worst]
    console.show(text_table(report.parameter_rows(shown), wrapped=("parameter",), failed="!"))
    if rest := len(report.parameters) - len(shown):
        console.print(f"and {rest} more, further from their bounds than these", highlight=False)


def _rank(world: World, job: VerifyJob) -> Report:
    prepared = prepare(job, ranks=world.size)
    try:
        return verify(
            prepared.model,
            prepared.loss,
            prepared.batches(job.steps),
            prepared.job.plan,
            world=world,
            dtype=getattr(torch, job.dtype),
            optimizer=prepared.optimizer,
            options=prepared.options(example=None),
            **prepared.optimizer_arguments,
        )
    except Exception as error:
        leave_traceback(error, world=world)
        raise
