"""`meshwise doctor`: print the examination of the machine; status 0 when all is well, 1 otherwise."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape

from meshwise.bench.doctor import DoctorReport, consult_job, consult_local
from meshwise.bench.machine import table
from meshwise.bench.pair_talk import PairTalks
from meshwise.cli.rank_count import asked
from meshwise.comm.api.launch_environment import is_under_launcher, prints_for_job
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole

_MARKS: Mapping[str, str] = {"ok": "[green]ok     [/]", "note": "[yellow]note   [/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class Doctor:
    """Examine this machine and whether ranks can communicate: local ranks, or under torchrun the ranks of the job."""

    ranks: int | None = None
    """Local ranks to start; by default one per GPU or core, 2 to 4."""

    seconds: float = 10.0
    """How long to wait for ranks that do not come."""


def main(words: Sequence[str]) -> int:
    """Examine and tell. Raises JobError for bad flags."""
    flags = parse_flags(words, prog="meshwise doctor", default=Doctor())
    if not flags.seconds > 0:
        raise JobError(f"seconds = {flags.seconds} has to be above 0")
    console = OutputConsole(soft_wrap=True, highlight=False)
    if is_under_launcher():
        report = consult_job(seconds=flags.seconds)
        if prints_for_job():
            _tell(console, report)
        elif not report.healthy:
            _tell_problems(console, report, prefix=f"rank {os.environ['RANK']}: ")
    else:
        report = consult_local(ranks=asked(flags.ranks), seconds=3 * flags.seconds)
        _tell(console, report)
    return 0 if report.healthy else 1


def _tell(console: OutputConsole, report: DoctorReport) -> None:
    for name, text in table(report.machine):
        console.print(f"{name:14} {escape(text)}")
    if report.machine.topology:
        console.print(escape(report.machine.topology))
    for held in report.talks:
        console.print(f"{_MARKS['ok']} {_talked(held)}")
    _tell_problems(console, report)
    console.print("all is well" if report.healthy else "[red]ranks cannot train here until this is remedied[/]")


def _tell_problems(console: OutputConsole, report: DoctorReport, *, prefix: str = "") -> None:
    for finding in report.findings:
        console.print(f"{_MARKS[finding.level]} {escape(prefix + finding.what)}")
        console.print(f"        {escape(finding.remedy)}")


def _talked(held: PairTalks) -> str:
    """Return one line about a conversation."""
    pairs = len(held.links)
    if not pairs:
        return f"{held.size} rank on {held.device} has no other to talk to; all-reduce adds up"
    latency = statistics.median(link.latency for link in held.links)
    bandwidth = statistics.median(link.bandwidth for link in held.links)
    return (
        f"{held.size} ranks on {held.device}, joined by {held.medium}, talked: {pairs} pair{'s' * (pairs > 1)}, median "
        f"latency {latency * 1e6:.0f} µs, bandwidth {bandwidth / 1e9:.2f} GB/s; all-reduce adds up"
    )
