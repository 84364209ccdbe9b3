"""The command `meshwise doctor`: check that this machine can train and its ranks can communicate, and print why not."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape

from meshwise.bench.doctor import DoctorReport, PairMessages, examine_job, examine_local_ranks
from meshwise.bench.machine import machine_table
from meshwise.comm.api.launcher_info import is_under_launcher, prints_for_job
from meshwise.train.console_output import OutputConsole
from meshwise.train.flags_and_toml import parse_flags
from meshwise.train.job_settings import JobError, check_least

_MARKS: Mapping[str, str] = {"note": "[yellow]note   [/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class DoctorFlags:
    """Examine this machine, and check that ranks can communicate: local ranks, or the ranks of a job under torchrun."""

    ranks: int | None = None
    """Local ranks to start; ignored under torchrun. Default: one for each GPU (without GPUs, for each core), 2 to 4."""
    seconds: float = 10.0
    """Time limit in seconds for reaching the store of the job and for the roll call, both only under torchrun.
    Connecting and exchanging messages may take three times as long each."""

    def __post_init__(self) -> None:
        check_least(self, least=1, names="ranks")
        if not self.seconds > 0:
            raise JobError(f"seconds = {self.seconds} has to be above 0")


def main(words: Sequence[str]) -> int:
    """Examine the machine, print the findings, and return 1 if there is a problem, else 0. Raises JobError."""
    flags = parse_flags(words, prog="meshwise doctor", default=DoctorFlags())
    console = OutputConsole(soft_wrap=True, highlight=False)
    if is_under_launcher():
        report = examine_job(seconds=flags.seconds)
        if prints_for_job():
            _print_report(console, report)
        elif not report.healthy:
            _print_findings(console, report, prefix=f"rank {os.environ['RANK']}: ")
    else:
        report = examine_local_ranks(ranks=flags.ranks, seconds=3 * flags.seconds)
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
    verdict = "all is well" if report.healthy else "[red]ranks cannot train here until these problems are solved[/]"
    console.print(verdict)


def _print_findings(console: OutputConsole, report: DoctorReport, *, prefix: str = "") -> None:
    for finding in report.findings:
        console.print(f"{_MARKS[finding.level]} {escape(prefix + finding.what)}")
        console.print(f"        {escape(finding.remedy)}")


def _pairs_line(exchange: PairMessages) -> str:
    """Return one line with the number of pairs of ranks, and the median latency and bandwidth of their messages."""
    pairs = len(exchange.links)
    if not pairs:
        return f"{exchange.size} rank on {exchange.device}: it exchanged no messages; its all-reduce gave the right sum"
    latency = statistics.median(link.latency for link in exchange.links)
    bandwidth = statistics.median(link.bandwidth for link in exchange.links)
    return (
        f"{exchange.size} ranks on {exchange.device}, joined by {exchange.medium}, communicate: {pairs} "
        f"pair{'s' * (pairs > 1)}, median latency {latency * 1e6:.0f} µs, "
        f"bandwidth {bandwidth / 1e9:.2f} GB/s; all-reduce gave the right sum"
    )
