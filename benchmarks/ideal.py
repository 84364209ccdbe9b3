"""How far from perfect: the step of every contestant in units of ideal, the one-thread step of one process / ranks.

    python benchmarks/ideal.py                                   # meshwise and torch
    python benchmarks/ideal.py --only meshwise --turns 12
    python benchmarks/ideal.py --python deepspeed=/path/to/python --python fairscale=/path/to/python

A contestant and the single process are resident together and take turns of one step, so both meet the machine in the
same state. Two figures: the median over the turns of (its step) / (the single process's next to it / ranks), and the
same of the best step of each, which is what a quiet machine would show.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from contestants import OURS, PEERS, SINGLE, Contestant
from gpt import Shape
from peers import assignments
from team import Team


def measure(contestant: Contestant, *, python: str, ranks: int, turns: int) -> tuple[float, float]:
    """The median and the best step of a contestant, in units of ideal."""
    shape = Shape()
    with (
        Team(SINGLE, python=sys.executable, shape=shape, ranks=1) as single,
        Team(contestant, python=python, shape=shape, ranks=ranks) as team,
    ):
        for one in (single, team):
            one.wait_until_ready()
            one.turn(steps=2)
        ideal, found = [], []
        for _ in range(turns):
            ideal.append(single.turn(steps=1).seconds / ranks)
            found.append(team.turn(steps=1).seconds)
    ratios = [ours / best for ours, best in zip(found, ideal, strict=True)]
    return statistics.median(ratios), min(found) / min(ideal)


def main(words: Sequence[str] | None = None) -> int:
    """Measure those chosen, one line each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes per contestant")
    parser.add_argument("--turns", type=int, default=8, help="steps of each, one after the other's")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="contestants whose name has it")
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH", help="a peer's interpreter")
    arguments = parser.parse_args(words)
    given = assignments(arguments.python, option="--python", known=["deepspeed", "fairscale"])
    pythons = {"meshwise": sys.executable, "torch": sys.executable, **given}
    for contestant in (*OURS, *PEERS):
        chosen = not arguments.only or any(text in contestant.name for text in arguments.only)
        if chosen and contestant.package in pythons:
            median, best = measure(
                contestant, python=pythons[contestant.package], ranks=arguments.ranks, turns=arguments.turns
            )
            print(f"{contestant.name:24} median {median:.3f}  best {best:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
