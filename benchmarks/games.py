"""Games of a contestant of ours beside a peer's, at several numbers of ranks: what `tensor_peers.py` and
`pipeline_peers.py` have in common. A game is played turn by turn, as a match of `peers.py` is."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import gpt
from contestants import Contestant
from peer_table import Pair, machine, write_between_markers
from peers import Match, assignments, play, reference_losses
from team import ContestantFailed, Team

Pairs = Mapping["Game", Sequence[Pair]]


@dataclass(frozen=True)
class Game:
    """Two contestants at one number of ranks."""

    ranks: int
    ours: Contestant
    peer: Contestant

    def __str__(self) -> str:
        return f"{self.ours.name} beside {self.peer.name} at {self.ranks} ranks"


@dataclass(frozen=True)
class Event:
    """Games that make one page of `docs/benchmarks.md`.

    script, about   the file's name and docstring
    marker          of the table on the page
    packages        peers beside torch, whose interpreters have to be named
    remarks         what stands under the table beside what always does
    more            what stands under the table of ratios: other tables of the same pairs"""

    script: str
    about: str
    marker: str
    games: Sequence[Game]
    packages: Sequence[str]
    remarks: Callable[[gpt.Shape], Sequence[str]]
    more: Callable[[Pairs], str] = lambda _pairs: ""

    def main(self, words: Sequence[str] | None) -> int:
        """Play the games that the command line names; 0 when every one was measured."""
        arguments = self.parse(words)
        sizes = assignments(
            arguments.shape, option="--shape", known=[field.name for field in dataclasses.fields(gpt.Shape)]
        )
        given = assignments(arguments.python, option="--python", known=self.packages)
        pythons = {"meshwise": sys.executable, "torch": sys.executable, **given}
        shape = gpt.Shape(**{name: int(size) for name, size in sizes.items()})
        match = Match(shape=shape, ranks=1, warmup=arguments.warmup, pairs=arguments.pairs, steps=arguments.steps)
        pairs, problems = tournament(
            match, games=self.chosen(arguments.only, pythons), pythons=pythons, rounds=arguments.rounds
        )
        remarks = [*_setting(shape), *self.remarks(shape), f"Made by `{self.command(arguments)}`.", *problems]
        text = table(pairs, remarks=remarks, more=self.more(pairs))
        print(text)
        if arguments.docs:
            write_between_markers(arguments.docs, text=text, table=self.marker)
        return 1 if problems else 0

    def chosen(self, only: Sequence[str], pythons: Mapping[str, str]) -> list[Game]:
        """The games of those who can be started. Raises SystemExit when none is left."""
        games = [
            game
            for game in self.games
            if game.peer.package in pythons and (not only or any(text in str(game) for text in only))
        ]
        if not games:
            raise SystemExit(f"--only {only}: no such game; there are {'; '.join(map(str, self.games))}")
        return games

    def command(self, arguments: argparse.Namespace) -> str:
        """The command line that repeats a run, without this machine's paths."""
        words = [f"--rounds {arguments.rounds} --pairs {arguments.pairs} --steps {arguments.steps}"]
        words += [f"--warmup {arguments.warmup}"]
        words += [f"--only {shlex.quote(only)}" for only in arguments.only]
        words += [f"--shape {size}" for size in arguments.shape]
        words += [f"--python {word.partition('=')[0]}=PYTHON" for word in arguments.python]
        return f"python benchmarks/{self.script} {' '.join(words)}"

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """The command line."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=3, help="how often a game is played, with fresh processes")
        parser.add_argument("--pairs", type=int, default=6, help="pairs of turns in a game")
        parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
        parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn: their losses count")
        parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="games whose line has it")
        parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH", help="its interpreter")
        parser.add_argument("--shape", action="append", default=[], metavar="SIZE=N", help="another model: layers=2 …")
        parser.add_argument("--docs", type=Path, help=f"write the table between the markers `{self.marker}` of a file")
        return parser.parse_args(words)


def tournament(
    match: Match, *, games: Sequence[Game], pythons: Mapping[str, str], rounds: int
) -> tuple[dict[Game, list[Pair]], list[str]]:
    """The pairs of every game, and what has to be said about those that could not be played."""
    reference = reference_losses(match, python=pythons["torch"])
    pairs: dict[Game, list[Pair]] = {game: [] for game in games}
    failed: dict[Game, str] = {}
    for number in range(rounds):
        for game in games:
            if game in failed:
                continue
            try:
                with (
                    Team(game.ours, python=pythons[game.ours.package], shape=match.shape, ranks=game.ranks) as ours,
                    Team(game.peer, python=pythons[game.peer.package], shape=match.shape, ranks=game.ranks) as peer,
                ):
                    played, _ = play(match, teams=(ours, peer), reference=reference, round_number=number)
            except ContestantFailed as error:
                failed[game] = str(error).splitlines()[0]
                print(error, file=sys.stderr, flush=True)
                continue
            pairs[game] += played
            print(f"round {number + 1}/{rounds}  {row(game, played)}", flush=True)
    return pairs, list(failed.values())


def row(game: Game, pairs: Sequence[Pair]) -> str:
    """One line of the table."""
    ratios = sorted(pair.ours_seconds / pair.peer_seconds for pair in pairs)
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    processor = statistics.median(pair.ours_processor / pair.peer_processor for pair in pairs)
    return (
        f"| {game.ranks} | {game.ours.name} | {game.peer.name} | {game.peer.what} | "
        f"{statistics.median(pair.ours_seconds for pair in pairs):.3f} | "
        f"{statistics.median(pair.peer_seconds for pair in pairs):.3f} | "
        f"**{median:.3f}** ({lower:.3f}–{upper:.3f}) | {processor:.3f} | "
        f"{max(max(pair.ours_megabytes) for pair in pairs):.0f} | "
        f"{max(max(pair.peer_megabytes) for pair in pairs):.0f} |"
    )


def table(pairs: Pairs, *, remarks: Sequence[str], more: str = "") -> str:
    """The table, and under it what has to be said about it."""
    names = ["ranks", "ours", "beside", "its setting", "our step, s", "its step, s", "ratio (quartiles)", "processor"]
    head = [f"| {' | '.join([*names, 'our MB', 'its MB'])} |", "|---" * (len(names) + 2) + "|"]
    rows = [row(game, played) for game, played in pairs.items() if played]
    return "\n".join([*head, *rows, "", *([more] if more else []), *(f"- {remark}" for remark in remarks)]) + "\n"


def _setting(shape: gpt.Shape) -> list[str]:
    return [
        f"Machine: {machine()}, torch {torch.__version__}; processes of one thread.",
        f"Model: {shape}, fp32, fused AdamW, one parameter group, no clipping.",
        "Seconds: median per step. Ratio: median of ours/peer over the pairs (lower and upper quartile).",
        "Processor: the same ratio of the processor time of all ranks. MB: as for the table above, of the worst rank.",
    ]
