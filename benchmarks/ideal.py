"""How far from perfect: the step of every contestant in units of ideal, the one-thread step of one process / ranks.

    python benchmarks/ideal.py                                        # meshwise and torch
    python benchmarks/ideal.py --only meshwise --turns 12
    python benchmarks/ideal.py --python deepspeed=PATH --python fairscale=PATH --python megatron=PATH --docs PAGE

Some contestants and the single process are resident together and take turns of one step, so all meet the machine in the
same state. Two figures: the median over the turns of (its step) / (the single process's of that turn / ranks), and the
same of the best step of each, which is nearer to what a quiet machine would show. The table tells which of them hold
a bar. A pipeline of p stages and m micro-batches under 1F1B stands still for (p-1) / (m+p-1) of its time, so its ideal
is (m+p-1)/m. Processes that split nothing and exchange nothing show what the machine takes from four that compute at
once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import contestants
import pipeline_contestants
import tensor_contestants
from contestants import SINGLE, Contestant
from gpt import Shape
from peer_table import machine, write_between_markers
from peers import assignments, check_losses
from team import ContestantFailed, Team, Turn

BAR_RANKS = 4
_BUBBLE = (pipeline_contestants.MICROBATCHES + BAR_RANKS - 1) / pipeline_contestants.MICROBATCHES
_WARMUP = 2
_MET = {(True, True): "yes", (True, False): "median", (False, True): "best", (False, False): "no"}


@dataclass(frozen=True)
class Entry:
    """A contestant, how it splits the model, and at most how many ideals its step is to take on `BAR_RANKS` ranks;
    `alike`: how many of its first losses are one process's."""

    split: str
    contestant: Contestant
    bar: float | None = None
    alike: int = _WARMUP


ENTRIES = (
    *(Entry("nothing", apart, alike=1) for apart in contestants.APART),
    *(Entry(f"data, ZeRO {ours.stage}", ours, 1.05) for ours in contestants.OURS),
    *(Entry(f"data, ZeRO {peer.stage}", peer) for peer in contestants.PEERS),
    *(Entry("tensor", tensor_contestants.contestant(name), 1.25) for name in ("meshwise 1d", "meshwise 1d, sequence")),
    *(Entry("tensor", tensor_contestants.contestant(name)) for name in ("torch DTensor", "Megatron-Core")),
    Entry("pipeline", pipeline_contestants.contestant("meshwise 1f1b"), 1.06 * _BUBBLE),
    *(Entry("pipeline", pipeline_contestants.contestant(f"meshwise zb-{which}"), _BUBBLE) for which in ("h1", "h2")),
    *(Entry("pipeline", peer) for peer in pipeline_contestants.PEERS),
)


@dataclass(frozen=True)
class Distance:
    """What was measured of an entry, in units of ideal; `processor`: of the processor time of the single process;
    `megabytes`: the peak of the worst rank in the timed steps."""

    entry: Entry
    median: float
    best: float
    processor: float
    megabytes: float

    def row(self, *, ranks: int) -> str:
        """A line of the table."""
        contestant, bar = self.entry.contestant, self.entry.bar
        held = ["", ""]
        if bar is not None and ranks == BAR_RANKS:
            held = [f"{bar:.3f}", _MET[self.median <= bar, self.best <= bar]]
        cells = [self.entry.split, contestant.name, contestant.what]
        cells += [f"{self.median:.3f}", f"**{self.best:.3f}**", f"{self.processor:.3f}", f"{self.megabytes:.0f}", *held]
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Rules:
    """How contestants are measured: the interpreters by package, what is trained, on how many ranks, how many timed
    turns, and the losses of the first steps."""

    pythons: Mapping[str, str]
    shape: Shape
    ranks: int
    turns: int
    reference: Sequence[float]


def measure(entries: Sequence[Entry], *, single: Team, rules: Rules) -> Iterator[Distance | ContestantFailed]:
    """Let them and the single process take turns, one group that is resident together. Of each entry its distance, or
    how it failed, also by losses that are not the reference's."""
    with contextlib.ExitStack() as stack:
        teams: dict[Entry, Team] = {}
        for entry in entries:
            try:
                teams[entry] = _ready(entry, stack, rules)
            except ContestantFailed as error:
                yield error
        pairs: dict[Entry, list[tuple[Turn, Turn]]] = {entry: [] for entry in teams}
        for number in range(rules.turns):
            alone = single.turn(steps=1)
            for entry in list(teams)[:: 1 if number % 2 else -1]:
                try:
                    pairs[entry].append((alone, teams[entry].turn(steps=1)))
                except ContestantFailed as error:
                    del teams[entry]
                    yield error
        for entry in teams:
            yield _distance(entry, pairs[entry], ranks=rules.ranks)


def _ready(entry: Entry, stack: contextlib.ExitStack, rules: Rules) -> Team:
    """The processes of an entry, after their first steps. Raises ContestantFailed."""
    contestant = entry.contestant
    python = rules.pythons[contestant.package]
    team = stack.enter_context(Team(contestant, python=python, shape=rules.shape, ranks=rules.ranks))
    team.wait_until_ready()
    losses = team.turn(steps=_WARMUP).losses
    check_losses(contestant.name, losses=losses[: entry.alike], reference=rules.reference[: entry.alike])
    team.reset_peak()
    return team


def _distance(entry: Entry, pairs: Sequence[tuple[Turn, Turn]], *, ranks: int) -> Distance:
    """What turns of the single process and of the contestant show."""
    return Distance(
        entry=entry,
        median=statistics.median(ours.seconds / alone.seconds for alone, ours in pairs) * ranks,
        best=min(ours.seconds for _, ours in pairs) / min(alone.seconds for alone, _ in pairs) * ranks,
        processor=statistics.median(
            ours.processor_seconds / max(alone.processor_seconds, 1e-9) for alone, ours in pairs
        ),
        megabytes=max(max(ours.megabytes) for _, ours in pairs),
    )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=BAR_RANKS, help="processes per contestant")
    parser.add_argument("--turns", type=int, default=8, help="steps of each, one after the other's")
    parser.add_argument("--together", type=int, default=3, help="contestants that are resident at the same time")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="those whose name or split has it")
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH", help="a peer's interpreter")
    parser.add_argument("--shape", action="append", default=[], metavar="SIZE=N", help="another model: layers=2 …")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `ideal` of this file")
    return parser.parse_args(words)


def command(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run, without this machine's paths."""
    words = [f"python benchmarks/ideal.py --ranks {arguments.ranks} --turns {arguments.turns}"]
    words += [f"--together {arguments.together}"]
    words += [f"--only {only!r}" for only in arguments.only]
    words += [f"--shape {size}" for size in arguments.shape]
    words += [f"--python {word.partition('=')[0]}=PYTHON" for word in arguments.python]
    return " ".join(words)


def table(distances: Sequence[Distance], *, ranks: int, remarks: Sequence[str]) -> str:
    """What goes into the page."""
    head = ["| split | contestant | its setting | median | best | processor | MB | bar | met |", "|---" * 9 + "|"]
    rows = [distance.row(ranks=ranks) for distance in distances]
    return "\n".join([*head, *rows, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def chosen(arguments: argparse.Namespace, packages: Sequence[str]) -> list[Entry]:
    """The entries that the command line names and whose package is there. Raises SystemExit when there is none."""
    entries = [
        entry
        for entry in ENTRIES
        if entry.contestant.package in packages
        and (not arguments.only or any(text in f"{entry.split} {entry.contestant.name}" for text in arguments.only))
    ]
    if not entries:
        names = ", ".join(entry.contestant.name for entry in ENTRIES)
        raise SystemExit(f"--only {arguments.only}: no such contestant; there are {names}")
    return entries


def main(words: Sequence[str] | None = None) -> int:
    """Measure those chosen, one line each as soon as it is known; 0 when all were measured."""
    arguments = parse(words)
    sizes = assignments(arguments.shape, option="--shape", known=[field.name for field in dataclasses.fields(Shape)])
    shape = Shape(**{name: int(size) for name, size in sizes.items()})
    given = assignments(arguments.python, option="--python", known=["deepspeed", "fairscale", "megatron"])
    pythons = {"meshwise": sys.executable, "torch": sys.executable, **given}
    entries = chosen(arguments, list(pythons))
    distances, failures = [], []
    with Team(SINGLE, python=sys.executable, shape=shape, ranks=1) as single:
        single.wait_until_ready()
        rules = Rules(pythons, shape, arguments.ranks, arguments.turns, single.turn(steps=_WARMUP).losses)
        for start in range(0, len(entries), arguments.together):
            group = entries[start : start + arguments.together]
            for found in measure(group, single=single, rules=rules):
                if isinstance(found, ContestantFailed):
                    failures.append(str(found).splitlines()[0])
                    print(found, file=sys.stderr, flush=True)
                    continue
                distances.append(found)
                print(found.row(ranks=arguments.ranks), flush=True)
    remarks = [
        f"Machine: {machine()}, torch {torch.__version__}; {arguments.ranks} processes of one thread.",
        f"Model: {shape}, fp32, fused AdamW, one parameter group, no clipping.",
        f"{arguments.turns} turns, of {arguments.together} contestants and the single process in each.",
        "Median: of the turns' ratios. Best: best step over best step, of whatever turns; it may be the larger one.",
        "Both are in units of ideal, and each is held against the bar.",
        "Processor: processor time of all ranks in units of that of the single process.",
        "MB: high-water mark of resident memory of the worst rank, libraries too; memory that ranks share counts once.",
        f"Made by `{command(arguments)}`.",
        *failures,
    ]
    text = table(distances, ranks=arguments.ranks, remarks=remarks)
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="ideal")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
