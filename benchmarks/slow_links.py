"""Seconds of a step over emulated slow links: fp32 and 1-bit gradients, and DiLoCo, beside links that cost nothing.

    python benchmarks/slow_links.py

Four ranks train the GPT of 33.7 million parameters of `gpt.py`; every call along dp takes as long as on `--link`. The
plans take turns, one step each. DiLoCo agrees every 50 steps: its mean is of 49 steps without agreement and one with.
Both are medians of measured steps; the benchmark agrees every `--every` steps, to see some."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import gpt
import meshwise as mw
from meshwise.comm.api.world import EmulatedLink

PLANS = {
    "dp=4, links that cost nothing": ("dp=4", False),
    "dp=4": ("dp=4", True),
    "dp=4 wire=1bit": ("dp=4 wire=1bit", True),
    "dp=4 sync=diloco": ("dp=4 sync=diloco every={every}", True),
}
AGREE = 50


def loss(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy and the number of tokens."""
    targets = batch[1]
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return summed, targets.numel()


def measured(world: mw.World, link: str, steps: int, every: int) -> dict[str, list[float]]:
    """Return the seconds of each step under each plan."""
    shape = gpt.Shape()
    torch.set_num_threads(1)
    trainers: dict[str, mw.Trainer] = {}
    for name, (plan, slow) in PLANS.items():
        world.link = EmulatedLink.parse(f"{link} dp") if slow else None  # of the views that the trainer makes
        trainers[name] = mw.parallelize(
            gpt.build(shape), plan.format(every=every), loss=loss, optimizer=torch.optim.AdamW, world=world, **gpt.ADAMW
        )
    seconds: dict[str, list[float]] = {name: [] for name in PLANS}
    for step in range(1, steps + 1):
        for name, trainer in trainers.items():
            world.barrier()
            start = time.perf_counter()
            trainer.step(gpt.global_batch(shape, step=step))
            world.barrier()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Run the plans, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100Mbit 2ms")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=3)
    chosen = parser.parse_args()
    seconds = mw.run(4, measured, args=(chosen.link, chosen.steps, chosen.every))[0]
    means = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    local = [s for step, s in enumerate(seconds["dp=4 sync=diloco"], start=1) if step > 1 and step % chosen.every]
    agreed = [s for step, s in enumerate(seconds["dp=4 sync=diloco"], start=1) if step % chosen.every == 0]
    share = statistics.median(local) * (AGREE - 1) + statistics.median(agreed)
    means["dp=4 sync=diloco"] = share / AGREE
    free = means["dp=4, links that cost nothing"]
    print(f"| plan, over {chosen.link} | seconds of a step | of free links |\n|---|--:|--:|")
    for name, mean in means.items():
        print(f"| `{name}` | {mean:.2f} | {mean / free:.2f} |")
    print(
        f"\ndiloco: {statistics.median(local):.2f} s without an agreement, {statistics.median(agreed):.2f} s with one"
    )


if __name__ == "__main__":
    main()
