"""Seconds of a step under `zero=1` with and without `overlap_gather=1`, over an emulated slow link.

    python benchmarks/overlap_gather.py
    python benchmarks/overlap_gather.py --link "10Gbit 1ms"

Two ranks train the GPT of 33.7 million parameters of `gpt.py`. The plans take turns. The first step of a turn is not
measured, so each measured step waits for the parameters of a step of the same plan and turn."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import gpt
import meshwise as mw
from meshwise.comm.api.world import EmulatedLink
from slow_links import loss

KEY = "overlap_gather=1"


def measured(world: mw.World, plan: str, link: str, rows: int, turns: int, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of a step in each turn, without the key and with it."""
    shape = gpt.Shape(batch=rows)
    torch.set_num_threads(1)
    trainers = []
    for named in (plan, f"{plan} {KEY}"):
        world.link = EmulatedLink.parse(f"{link} dp")  # of the views that the trainer makes
        trainers.append(
            mw.parallelize(gpt.build(shape), named, loss=loss, optimizer=torch.optim.AdamW, world=world, **gpt.ADAMW)
        )
    found: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for own, trainer in list(zip(found, trainers, strict=True))[:: 1 if turn % 2 else -1]:
            trainer.step(gpt.global_batch(shape, step=turn))
            world.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                trainer.step(gpt.global_batch(shape, step=turn))
            world.barrier()
            own.append((time.perf_counter() - start) / steps)
    for trainer in trainers:
        trainer.close()
    return list(zip(*(own[1:] for own in found), strict=True))  # the first turn warms up


def main() -> None:
    """Run the plans, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="dp=2 zero=1")
    parser.add_argument("--link", default="1Gbit 1ms")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    chosen = parser.parse_args()
    given = chosen.plan, chosen.link, chosen.rows, chosen.turns, chosen.steps
    turns = mw.run(mw.Plan.parse(chosen.plan).mesh().size, measured, args=given)[0]
    early, late = ([statistics.median(each), min(each)] for each in zip(*turns, strict=True))
    ratio = statistics.median(own / other for other, own in turns)
    print(f"| plan, over {chosen.link} | seconds of a step, median | best turn | median ratio | best ratio |")
    print("|---|--:|--:|--:|--:|")
    print(f"| `{chosen.plan}` | {early[0]:.2f} | {early[1]:.2f} | 1.00 | 1.00 |")
    print(f"| `{chosen.plan} {KEY}` | {late[0]:.2f} | {late[1]:.2f} | {ratio:.2f} | {late[1] / early[1]:.2f} |")


if __name__ == "__main__":
    main()
