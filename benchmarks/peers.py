"""Ours beside the peers: the same model, the same ranks, turn by turn.

    python benchmarks/peers.py                                   # meshwise and torch
    python benchmarks/peers.py --python deepspeed=/path/to/python --python fairscale=/path/to/python
    python benchmarks/peers.py --only zero=1 --rounds 1 --pairs 2

A machine's speed drifts by more than the contestants differ. So each peer plays a match against ours at its ZeRO stage:
both are started, both stay resident, and they take turns of a few steps, ours first and its peer first alternately:

    ours peer | peer ours | ours peer | …          one pair is two neighbouring turns; its ratio is ours / peer

The figure is the median of the paired ratios over all matches; a round plays every match once, with fresh processes.
While one has its turn the other waits on a pipe; the processor time the waiting side used is measured and reported.
A contestant whose losses differ from plain torch's on one process computes something else, and is disqualified."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from contestants import OURS, PEERS, SINGLE, Contestant
from gpt import Shape
from peer_table import Pair, machine, markdown, summarise, write_between_markers
from team import ContestantFailed, Team

_TOLERANCE = 2e-5
"""Largest relative difference of a loss from the reference that the order of fp32 sums explains in a few steps."""


@dataclass(frozen=True)
class Match:
    """How a match is played."""

    shape: Shape
    ranks: int
    warmup: int
    pairs: int
    steps: int


@dataclass
class Result:
    """Everything measured. `idle_share`: cores used by the waiting side, at worst, over a match."""

    pairs: list[Pair] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    idle_share: float = 0.0


def reference_losses(match: Match, *, python: str) -> tuple[float, ...]:
    """The first losses by plain torch on one process."""
    with Team(SINGLE, python=python, shape=match.shape, ranks=1, threads=match.ranks) as team:
        team.wait_until_ready()
        return team.turn(steps=match.warmup).losses


def check_losses(name: str, *, losses: Sequence[float], reference: Sequence[float]) -> None:
    """Raises ContestantFailed when a loss is not the reference's."""
    for step, (loss, wanted) in enumerate(zip(losses, reference, strict=True)):
        if not abs(loss - wanted) <= _TOLERANCE * abs(wanted):
            raise ContestantFailed(
                f"{name}: disqualified, loss {loss:.6f} at step {step}, plain torch has {wanted:.6f}"
            )


def play(
    match: Match, *, teams: tuple[Team, Team], reference: Sequence[float], round_number: int
) -> tuple[list[Pair], float]:
    """One match, ours first in `teams`: its pairs, and the cores its waiting side used."""
    ours, peer = teams
    for team in teams:
        team.wait_until_ready()
    for team in teams:
        check_losses(team.contestant.name, losses=team.turn(steps=match.warmup).losses, reference=reference)
        team.reset_peak()
    pairs, idle, busy = [], 0.0, 0.0
    for index in range(match.pairs):
        turns = {}
        for team, waiting in ((ours, peer), (peer, ours)) if index % 2 == 0 else ((peer, ours), (ours, peer)):
            before = waiting.cpu_seconds()
            turns[team] = team.turn(steps=match.steps)
            idle += waiting.cpu_seconds() - before
            busy += turns[team].seconds * match.steps
        pairs.append(
            Pair(
                peer=peer.contestant.name,
                round_number=round_number,
                ours_seconds=turns[ours].seconds,
                peer_seconds=turns[peer].seconds,
                ours_processor=turns[ours].processor_seconds,
                peer_processor=turns[peer].processor_seconds,
                ours_megabytes=turns[ours].megabytes,
                peer_megabytes=turns[peer].megabytes,
            )
        )
        if turns[ours].losses and abs(turns[ours].losses[-1] / turns[peer].losses[-1] - 1) > 10 * _TOLERANCE:
            raise ContestantFailed(f"{peer.contestant.name}: disqualified, its loss drifted from ours")
    return pairs, idle / busy


def tournament(match: Match, *, peers: Sequence[Contestant], pythons: Mapping[str, str], rounds: int) -> Result:
    """Every match of every round. A contestant that fails is reported and left out of the later rounds."""
    reference = reference_losses(match, python=pythons["torch"])
    result, failed = Result(), set[str]()
    for round_number in range(rounds):
        for peer in peers:
            if peer.name in failed:
                continue
            try:
                with (
                    Team(OURS[peer.stage], python=pythons["meshwise"], shape=match.shape, ranks=match.ranks) as ours,
                    Team(peer, python=pythons[peer.package], shape=match.shape, ranks=match.ranks) as other,
                ):
                    pairs, idle = play(match, teams=(ours, other), reference=reference, round_number=round_number)
            except ContestantFailed as error:
                failed.add(peer.name)
                result.remarks.append(str(error).splitlines()[0])
                print(error, file=sys.stderr, flush=True)
                continue
            result.pairs += pairs
            result.idle_share = max(result.idle_share, idle)
            line = summarise(pairs)[0]
            print(
                f"round {round_number + 1}/{rounds}  zero={peer.stage}  {peer.name:22} ours {line.ours_seconds:.3f} s  "
                f"its {line.peer_seconds:.3f} s  ratio {line.quartiles[1]:.3f}  processor {line.processor:.3f}  "
                f"peak {line.ours_megabytes:.0f} and {line.peer_megabytes:.0f} MB",
                flush=True,
            )
    return result


def remarks(arguments: argparse.Namespace, *, match: Match, result: Result, absent: Sequence[str]) -> list[str]:
    """What stands under the table."""
    shape = match.shape
    said = [
        f"Machine: {machine()}, torch {torch.__version__}; {match.ranks} processes of one thread, gloo.",
        f"Model: {shape}, fp32, fused AdamW, one parameter group, no clipping.",
        f"{arguments.rounds} rounds of {match.pairs} pairs of turns of {match.steps} steps. Seconds: median per step.",
        "Ratio: median of ours/peer over the pairs (lower and upper quartile).",
        "Processor: the same ratio of the processor time of all ranks.",
        "MB: high-water mark of resident memory of the worst rank in the timed steps, libraries too.",
        f"The waiting side used at most {result.idle_share:.3f} cores of the machine during the other's turns.",
        f"Made by `{command(arguments)}`.",
    ]
    if absent:
        said.append(f"Not measured, no interpreter given: {', '.join(sorted(absent))}.")
    return [*said, *result.remarks]


def command(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run, without this machine's paths."""
    words = ["python benchmarks/peers.py", f"--rounds {arguments.rounds}", f"--pairs {arguments.pairs}"]
    words += [f"--steps {arguments.steps}", f"--ranks {arguments.ranks}"]
    words += [f"--only {shlex.quote(only)}" for only in arguments.only]
    words += [f"--python {word.partition('=')[0]}=PYTHON" for word in arguments.python]
    words += [f"--shape {size}" for size in arguments.shape]
    return " ".join(words)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every match is played, with fresh processes")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of turns in a match")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn, whose losses are checked")
    parser.add_argument("--ranks", type=int, default=4, help="processes per contestant")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="peers whose name or zero=N has it")
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH", help="a peer's interpreter")
    parser.add_argument("--shape", action="append", default=[], metavar="SIZE=N", help="another model: layers=2 …")
    parser.add_argument("--json", type=Path, help="write every pair here")
    parser.add_argument("--docs", type=Path, help="write the table between the markers of this file")
    return parser.parse_args(words)


def assignments(words: Sequence[str], *, option: str, known: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping. Raises SystemExit with a readable line for anything else."""
    chosen = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise SystemExit(f"{option} {word}: expected KEY=VALUE with a key of {', '.join(known)}")
        chosen[key] = value
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Run the tournament; 0 when every chosen contestant was measured."""
    arguments = parse(words)
    sizes = assignments(arguments.shape, option="--shape", known=[field.name for field in dataclasses.fields(Shape)])
    given = assignments(arguments.python, option="--python", known=["deepspeed", "fairscale"])
    pythons = {"meshwise": sys.executable, "torch": sys.executable, **given}
    wanted = [
        peer
        for peer in PEERS
        if not arguments.only or any(only in f"{peer.name} zero={peer.stage}" for only in arguments.only)
    ]
    if not wanted:
        raise SystemExit(f"--only {arguments.only}: no such peer; there are {', '.join(peer.name for peer in PEERS)}")
    match = Match(
        shape=Shape(**{name: int(size) for name, size in sizes.items()}),
        ranks=arguments.ranks,
        warmup=arguments.warmup,
        pairs=arguments.pairs,
        steps=arguments.steps,
    )
    if match.shape.batch % match.ranks:
        raise SystemExit(
            f"the batch of {match.shape.batch} does not divide by {match.ranks} ranks: give --shape batch=N"
        )
    peers = [peer for peer in wanted if peer.package in pythons]
    result = tournament(match, peers=peers, pythons=pythons, rounds=arguments.rounds)
    absent = {peer.package for peer in wanted} - pythons.keys()
    text = markdown(
        summarise(result.pairs), remarks=remarks(arguments, match=match, result=result, absent=sorted(absent))
    )
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(dataclasses.asdict(result), indent=1))
    if arguments.docs:
        write_between_markers(arguments.docs, text=text)
    return 1 if result.remarks else 0


if __name__ == "__main__":
    sys.exit(main())
