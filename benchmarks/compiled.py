"""Steps of compiled blocks (`compile=blocks`) beside DDP with the whole model compiled.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --ranks 4 --docs docs/benchmarks.md

Both train the GPT of `gpt.py`, 33.7 million parameters, with inductor. Both loops compute the norm of the gradient,
test it for being finite and read the loss. Each starts with an empty cache of compiled code. The first steps contain
the compilation: meshwise compiles in its second step. Afterwards both take turns of one step."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import gpt
import host
from contestants import Builder, Contestant, Step
from peer_table import machine, write_between_markers
from team import Team

_FIRST = 3


def _ddp(shape: gpt.Shape, rank: int, size: int) -> Step:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(gpt.build(shape), gradient_as_bucket_view=True)
    return host.checked_loop(torch.compile(model), shape, rank, size)  # type: ignore[arg-type]


def _ours(more: str) -> Builder:
    return lambda shape, rank, size: host.meshwise_loop(f"dp={size}{more}")(shape, rank, size)


CONTESTANTS = (
    Contestant("torch.compile of DDP", -1, "torch", "", _ddp, module="compiled"),
    Contestant("`dp=N compile=blocks`", -1, "meshwise", "", _ours(" compile=blocks"), module="compiled"),
    Contestant("`dp=N`", -1, "meshwise", "", _ours(""), module="compiled"),
)


def contestant(name: str) -> Contestant:
    """The contestant of that name, which its process asks for. Raises StopIteration when there is none."""
    return next(each for each in CONTESTANTS if each.name == name)


def measure(shape: gpt.Shape, *, ranks: int, turns: int) -> list[list[float]]:
    """Return for each contestant the seconds of its first steps and of its later ones, which are taken in turns."""
    with contextlib.ExitStack() as stack:
        teams = []
        for each in CONTESTANTS:  # none finds what another one, or an earlier run, has compiled
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
            teams.append(stack.enter_context(Team(each, python=sys.executable, shape=shape, ranks=ranks)))
        for team in teams:
            team.wait_until_ready()
        seconds = [[team.turn(steps=1).seconds for _ in range(_FIRST)] for team in teams]
        for number in range(turns):
            for index in range(len(teams))[:: 1 if number % 2 else -1]:
                seconds[index].append(teams[index].turn(steps=1).seconds)
    return seconds


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10, help="steps of each contestant after its first three")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the global batch")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `compiled` of this file")
    flags = parser.parse_args(words)
    shape = gpt.Shape(batch=flags.batch)
    head = ["contestant", "first step, s", f"first {_FIRST} steps, s", "median, s", "best, s"]
    lines = [f"| {' | '.join([*head, 'median ratio', 'best ratio'])} |", "|---" * 7 + "|"]
    every = measure(shape, ranks=flags.ranks, turns=flags.turns)
    peer = every[0][_FIRST:]
    for each, seconds in zip(CONTESTANTS, every, strict=True):
        later = seconds[_FIRST:]
        cells = [seconds[0], sum(seconds[:_FIRST]), statistics.median(later), min(later)]
        ratio = statistics.median(own / other for own, other in zip(later, peer, strict=True))
        texts = [f"{cell:.2f}" for cell in cells] + [f"{ratio:.3f}", f"**{min(later) / min(peer):.3f}**"]
        lines.append(f"| {' | '.join([each.name, *texts])} |")
    text = "\n".join(
        [
            *lines,
            "",
            f"- Machine: {machine()}, torch {torch.__version__}; {flags.ranks} processes of one thread.",
            f"- Model: {shape}; fp32, fused AdamW, inductor.",
            f"- Median and best: of {flags.turns} steps after the first {_FIRST}, taken in turns.",
            "- Ratios are to the first row.",
        ]
    )
    print(text, flush=True)
    if flags.docs:
        write_between_markers(flags.docs, text=text + "\n", table="compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
