"""Tensor parallelism beside the peers: the same model, the same ranks, turn by turn, as in `peers.py`.

    python benchmarks/tensor_peers.py                                     # meshwise and torch's DTensor
    python benchmarks/tensor_peers.py --python megatron=/path/to/python   # and Megatron-Core's layers
    python benchmarks/tensor_peers.py --only 2d --rounds 1                # 2d beside 1d

Every rank holds its part of every matrix and sees the whole batch. The last match is between two schemes of ours, 2d
and 1d at four ranks; what each moves in a step is counted on one rank.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import gpt
import meshwise as mw
from meshwise.comm.thread_world import run_threads
from meshwise.comm.world import World
from peer_table import Pair, machine, write_between_markers
from peers import Match, assignments, play, reference_losses
from team import ContestantFailed, Team
from tensor_contestants import contestant


@dataclass(frozen=True)
class Game:
    """Two contestants at one number of ranks."""

    ranks: int
    ours: str
    peer: str

    def __str__(self) -> str:
        return f"{self.ours} beside {self.peer} at {self.ranks} ranks"


GAMES = (
    Game(2, "meshwise 1d", "torch DTensor"),
    Game(4, "meshwise 1d", "torch DTensor"),
    Game(2, "meshwise 1d", "Megatron-Core"),
    Game(4, "meshwise 1d", "Megatron-Core"),
    Game(4, "meshwise 1d, sequence", "torch DTensor, sequence"),
    Game(4, "meshwise 2d", "meshwise 1d"),
)


def volume(shape: gpt.Shape, plan: str) -> int:
    """Bytes of the collectives of one step, as the first rank sees them."""

    def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return gpt.mean_loss(logits, batch[1]) * batch[1].numel(), batch[1].numel()

    def step(world: World) -> int:
        trainer = mw.parallelize(copy.deepcopy(model), plan, loss=loss, world=world, **gpt.ADAMW)
        with world.record() as stamps:
            trainer.step(gpt.global_batch(shape, step=0))
        return sum(stamp.bytes for stamp in stamps)

    model = gpt.build(shape)
    return run_threads(mw.Plan.parse(plan).mesh().size, step)[0]


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
            sides = [contestant(name) for name in (game.ours, game.peer)]
            try:
                with (
                    Team(sides[0], python=pythons[sides[0].package], shape=match.shape, ranks=game.ranks) as ours,
                    Team(sides[1], python=pythons[sides[1].package], shape=match.shape, ranks=game.ranks) as peer,
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
        f"| {game.ranks} | {game.ours} | {game.peer} | {contestant(game.peer).what} | "
        f"{statistics.median(pair.ours_seconds for pair in pairs):.3f} | "
        f"{statistics.median(pair.peer_seconds for pair in pairs):.3f} | "
        f"**{median:.3f}** ({lower:.3f}–{upper:.3f}) | {processor:.3f} | "
        f"{max(pair.ours_megabytes for pair in pairs):.0f} | {max(pair.peer_megabytes for pair in pairs):.0f} |"
    )


def table(pairs: Mapping[Game, Sequence[Pair]], *, remarks: Sequence[str]) -> str:
    """The table, and under it what has to be said about it."""
    names = ["ranks", "ours", "beside", "its setting", "our step, s", "its step, s", "ratio (quartiles)", "processor"]
    head = [f"| {' | '.join([*names, 'our MB', 'its MB'])} |", "|---" * (len(names) + 2) + "|"]
    rows = [row(game, played) for game, played in pairs.items() if played]
    return "\n".join([*head, *rows, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every game is played, with fresh processes")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of turns in a game")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn, whose losses are checked")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="games whose line has it")
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH", help="a peer's interpreter")
    parser.add_argument("--shape", action="append", default=[], metavar="SIZE=N", help="another model: layers=2 …")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `tensor peers` of this file")
    return parser.parse_args(words)


def remarks(arguments: argparse.Namespace, *, shape: gpt.Shape) -> list[str]:
    """What stands under the table."""
    words = [f"--rounds {arguments.rounds} --pairs {arguments.pairs} --steps {arguments.steps}"]
    words += [f"--warmup {arguments.warmup}"]
    words += [f"--only {only!r}" for only in arguments.only] + [f"--shape {size}" for size in arguments.shape]
    words += [f"--python {word.partition('=')[0]}=PYTHON" for word in arguments.python]
    one, two = (volume(shape, plan) / 1e6 for plan in ("tp=4", "tp=4 tp_mode=2d"))
    return [
        f"Machine: {machine()}, torch {torch.__version__}; processes of one thread, gloo.",
        f"Model: {shape}, fp32, fused AdamW, one parameter group, no clipping. Every rank sees the whole batch.",
        "Seconds: median per step. Ratio: median of ours/peer over the pairs (lower and upper quartile).",
        "Processor: the same ratio of the processor time of all ranks. MB: as for the table above.",
        f"Payload of the collectives of a step for each of four ranks: {one:.0f} MB under 1d, {two:.0f} MB under 2d.",
        f"Made by `python benchmarks/tensor_peers.py {' '.join(words)}`.",
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Play the games; 0 when every chosen one was measured."""
    arguments = parse(words)
    sizes = assignments(
        arguments.shape, option="--shape", known=[field.name for field in dataclasses.fields(gpt.Shape)]
    )
    given = assignments(arguments.python, option="--python", known=["megatron"])
    pythons = {"meshwise": sys.executable, "torch": sys.executable, **given}
    games = [
        game
        for game in GAMES
        if contestant(game.peer).package in pythons
        and (not arguments.only or any(only in str(game) for only in arguments.only))
    ]
    if not games:
        raise SystemExit(f"--only {arguments.only}: no such game; there are {'; '.join(map(str, GAMES))}")
    shape = gpt.Shape(**{name: int(size) for name, size in sizes.items()})
    match = Match(shape=shape, ranks=1, warmup=arguments.warmup, pairs=arguments.pairs, steps=arguments.steps)
    pairs, problems = tournament(match, games=games, pythons=pythons, rounds=arguments.rounds)
    text = table(pairs, remarks=[*remarks(arguments, shape=shape), *problems])
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="tensor peers")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
