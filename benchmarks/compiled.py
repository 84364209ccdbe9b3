"""What torch.compile gives: compiled blocks (`compile=blocks`) beside DDP with the whole model compiled.

    python benchmarks/compiled.py --ranks 2

Both train the GPT of `gpt.py` with inductor. Both loops compute the gradient's norm, test it for being finite and read
the loss. The first three steps contain the compilation. Afterwards both take turns of one step; the ratio is the median
over the turns."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence

import torch
from torch import nn

import gpt
import host
from contestants import Contestant, Step
from peer_table import machine
from team import Team


def _ddp(shape: gpt.Shape, rank: int, size: int) -> Step:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(gpt.build(shape), gradient_as_bucket_view=True)
    return host._loop(torch.compile(model), shape, rank, size)  # type: ignore[arg-type]


def _ours(shape: gpt.Shape, rank: int, size: int) -> Step:
    return host._meshwise(f"dp={size} compile=blocks")(shape, rank, size)


PEER = Contestant("torch.compile of DDP", -1, "torch", "", _ddp, module="compiled")
OURS = Contestant("`dp=N compile=blocks`", -1, "meshwise", "", _ours, module="compiled")
PLAIN = Contestant("`dp=N`", -1, "meshwise", "", lambda *a: host._meshwise(f"dp={a[2]}")(*a), module="compiled")


def contestant(name: str) -> Contestant:
    """The contestant of that name, which its process asks for. Raises StopIteration when there is none."""
    return next(each for each in (PEER, OURS, PLAIN) if each.name == name)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="steps of each contestant after its first three")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the global batch")
    flags = parser.parse_args(words)
    shape = gpt.Shape(batch=flags.batch)
    print("| contestant | first 3 steps, s | median, s | best, s | processor, s | ratio | loss |\n" + "|---" * 7 + "|")
    with contextlib.ExitStack() as stack:
        teams = [
            stack.enter_context(Team(each, python=sys.executable, shape=shape, ranks=flags.ranks))
            for each in (PEER, OURS, PLAIN)
        ]
        for team in teams:
            team.wait_until_ready()
        firsts = [team.turn(steps=3) for team in teams]
        turns = [[team.turn(steps=1) for team in teams] for _ in range(flags.turns)]
    for number, team in enumerate(teams):
        seconds = [each[number].seconds for each in turns]
        ratio = statistics.median(each[number].seconds / each[0].seconds for each in turns)
        processor = statistics.median(each[number].processor_seconds for each in turns)
        cells = [3 * firsts[number].seconds, statistics.median(seconds), min(seconds), processor, ratio]
        loss = turns[-1][number].losses[-1]
        print(f"| {team.contestant.name} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {loss:.4f} |", flush=True)
    print(
        f"\n- Machine: {machine()}, torch {torch.__version__}; {flags.ranks} processes of one thread. Model: {shape}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
