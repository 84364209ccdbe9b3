"""Steps of a mixture of experts on four processes: its experts divided, beside the same model under other plans.

    python benchmarks/experts.py --rounds 15

A GPT of 4 blocks with 16 experts each, top-2, in fp32. All plans run in one set of processes, in turns of one step, in
alternating order. The time of a step is that of the slowest rank, from a barrier on. A ratio is the median over the
turns, with quartiles. Bytes of parameters are those of rank 0."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import meshwise as mw
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from peer_table import machine

PLANS = ("dp=4 ep=4", "dp=4 ep=2", "dp=4", "dp=4 zero=1 ep=4", "dp=4 zero=3", "dp=4 zero=3 ep=4")
SHAPE = MixtureConfig(layers=4, width=128, heads=4, vocabulary=256, context=128, experts=16, choices=2)
ROWS = 16
Found = dict[str, tuple[list[float], int]]
"""By plan: seconds of its steps, and bytes of parameters on rank 0."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(markdown(mw.run(4, measure, args=(arguments.rounds,))[0]))


def measure(world: mw.World, rounds: int) -> Found:
    """Run the steps of all plans in turns, and return their times: those of the slowest rank."""
    torch.set_num_threads(1)
    tokens = torch.randint(0, 256, (ROWS, 129), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    trainers = {
        plan: mw.parallelize(lambda: MixtureGPT(SHAPE), plan, loss=next_token_loss, world=world, lr=1e-3)
        for plan in PLANS
    }
    found: Found = {plan: ([], trainer.memory()["parameters"]) for plan, trainer in trainers.items()}
    for turn in range(-2, rounds):
        for plan in PLANS if turn % 2 else PLANS[::-1]:
            world.barrier()
            started = time.perf_counter()
            trainers[plan].step(batch)
            seconds = max(world.exchange(time.perf_counter() - started))
            if turn >= 0:
                found[plan][0].append(seconds)
    for trainer in trainers.values():
        trainer.close()
    return found


def markdown(found: Found) -> str:
    """Return the table."""
    first = found[PLANS[0]][0]
    lines = ["| plan, four processes | step, s | ratio to the first (quartiles) | parameters of a rank, MB |"]
    lines.append("|---|--:|---|--:|")
    for plan, (seconds, size) in found.items():
        ratios = [one / other for one, other in zip(seconds, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| `{plan}` | {statistics.median(seconds):.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {size / 1e6:.1f} |"
        )
    shape = f"{SHAPE.layers} blocks of {SHAPE.experts} experts, width {SHAPE.width}, {ROWS} x {SHAPE.context} tokens"
    return (
        "\n".join([*lines, "", f"- Machine: {machine()}; one thread a rank.", f"- {shape}, AdamW, {len(first)} turns."])
        + "\n"
    )


if __name__ == "__main__":
    main()
