"""`meshwise doctor`: print the examination of the machine; status 0 when all is well, 1 otherwise."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape

from meshwise.bench.doctor import DoctorReport, examine_job, examine_local_ranks
from meshwise.bench.machine import machine_table
from meshwise.bench.pair_messages import PairMessages
from meshwise.cli.flag_values import checked_ranks
from meshwise.comm.api.launch_environment import is_under_launcher, prints_for_job
from meshwise.train.console_output import OutputConsole
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError

_MARKS: Mapping[str, str] = {"note": "[yellow]note   [/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class DoctorFlags:
    """Examine this machine and whether ranks can communicate: local ranks, or under torchrun the ranks of the job."""

    ranks: int | None = None
    """Local ranks to start. Default: one per GPU or core, 2 to 4."""
    seconds: float = 10.0
    """Seconds to wait for ranks that do not start."""


def main(words: Sequence[str]) -> int:
    """Examine the machine and print the findings. Raises JobError for bad flags."""
    flags = parse_flags(words, prog="meshwise doctor", default=DoctorFlags())
    if not flags.seconds > 0:
        raise JobError(f"seconds = {flags.seconds} has to be above 0")
    console = OutputConsole(soft_wrap=True, highlight=False)
    if is_under_launcher():
        report = examine_job(seconds=flags.seconds)
        if prints_for_job():
            _print_report(console, report)
        elif not report.healthy:
            _print_findings(console, report, prefix=f"rank {os.environ['RANK']}: ")
    else:
        report = examine_local_ranks(ranks=checked_ranks(flags.ranks), seconds=3 * flags.seconds)
        _print_report(console, report)
    return 0 if report.healthy else 1


def _print_report(console: OutputConsole, report: DoctorReport) -> None:
    for name, text in machine_table(report.machine):
        console.print(f"{name:14} {escape(text)}")
    if report.machine.topology:
        console.print(escape(report.machine.topology))
    for exchange in report.exchanges:
        console.print(f"[green]ok     [/] {_pairs_line(exchange)}")
    _print_findings(console, report)
    console.print("all is well" if report.healthy else "[red]ranks cannot train here until the problems are solved[/]")


def _print_findings(console: OutputConsole, report: DoctorReport, *, prefix: str = "") -> None:
    for finding in report.findings:
        console.print(f"{_MARKS[finding.level]} {escape(prefix + finding.what)}")
        console.print(f"        {escape(finding.remedy)}")


def _pairs_line(exchange: PairMessages) -> str:
    """Return one line about the messages between all pairs of ranks."""
    pairs = len(exchange.links)
    if not pairs:
        return f"{exchange.size} rank on {exchange.device} has no peer; all-reduce is right"
    latency = statistics.median(link.latency for link in exchange.links)
    bandwidth = statistics.median(link.bandwidth for link in exchange.links)
    return (
        f"{exchange.size} ranks on {exchange.device}, joined by {exchange.medium}, communicate: {pairs} "
        f"pair{'s' * (pairs > 1)}, median latency {latency * 1e6:.0f} µs, "
        f"bandwidth {bandwidth / 1e9:.2f} GB/s; all-reduce is right"
    )
