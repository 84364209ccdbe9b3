"""The command `meshwise verify`: compare a job under its plan with one process. Status 0: within the bounds, else 1."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.text import Text

from meshwise.cli.shared_flags import checked_comm, local_ranks, say_start
from meshwise.comm.api.launcher_info import is_rank, prints_for_job
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.comm.launch.launch import run
from meshwise.train.console_output import OutputConsole, leave_traceback, text_table
from meshwise.train.flags_and_toml import read_job
from meshwise.train.job_settings import JobError, StudiedJob, check_least
from meshwise.train.prepare_job import check_plan, prepare
from meshwise.verify import Report, verify


@dataclass(frozen=True)
class VerifyJob(StudiedJob):
    """Train some steps of a job under its plan and in one process, and compare the results."""

    steps: int | None = None
    """Optimizer steps to compare, on the first batches of the job, at its peak learning rate. Default: 3, and with a
    `sync` across steps at least one more than `every`."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Element type of the parameters; train.dtype is ignored. In float64 a relative difference of 1e-9 is allowed. In
    other types the allowed difference is measured: the difference that rounding causes."""
    comm: Literal["auto", "local", "gloo", "threads"] = "auto"  # type: ignore[assignment] # one value more than training
    """How the ranks communicate, as in training; or `threads`: they are threads of this process, which start faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, least=1, names="steps")


def main(arguments: Sequence[str]) -> int:
    """Verify the job that the arguments describe, and return the exit status. Raises JobError or PlanError."""
    job = read_job(arguments, prog="meshwise verify", kind=VerifyJob)
    size, comm = local_ranks(job), checked_comm(job.comm)
    if job.model.quantization:
        raise JobError(f"verify computes in {job.dtype}, and model.quantization does not; verify without it")
    prepared = prepare(job, ranks=size)
    if not is_rank():
        check_plan(prepared)
    # The other ranks wait while rank 0 trains the reference run alone, which the watchdog must not take for a hang.
    os.environ.setdefault("MESHWISE_STALL_SECONDS", "3600")
    if is_rank() or job.comm != "threads":
        say_start(size, words=["verify", *arguments])
        report: Report = run(size, _rank, args=(job,), comm=comm)[0]
    else:
        report = run_threads(size, _rank, args=(job,), timeout=None)[0]
    if prints_for_job():
        print_report(report, console=OutputConsole())
    return 0 if report.ok else 1


def print_report(report: Report, *, console: OutputConsole) -> None:
    """Print the verdict, notes, first difference, steps, and the 40 parameters or buffers with the largest excess."""
    console.show(Text(report.verdict, style="bold green" if report.ok else "bold red"))
    lines = [report.setting, *report.notes, *([] if report.first is None else [str(report.first)])]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False, end="\n\n")
    console.show(text_table(report.step_rows(), failed="!"))
    console.print()
    worst = sorted(report.parameters, key=lambda line: -line.excess)[:40]
    shown = [line for line in report.parameters if line in worst]
    console.show(text_table(report.parameter_rows(shown), wrapped=("parameter",), failed="!"))
    if rest := len(report.parameters) - len(shown):
        console.show(f"and {rest} more, all smaller relative to the bound")


def _rank(world: World, job: VerifyJob) -> Report:
    prepared = prepare(job, ranks=world.size)
    try:
        return verify(
            prepared.model,
            batches=prepared.batches(job.steps or max(3, job.plan.every + 1)),
            plan=prepared.job.plan,
            world=world,
            dtype=getattr(torch, job.dtype),
            **prepared.training(example=None),
        )
    except Exception as error:
        leave_traceback(error, world=world)
        raise
