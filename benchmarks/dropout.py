"""What masks that do not depend on the plan cost: beside torch's dropout, per element and per step.

    python benchmarks/dropout.py

Two things are timed, on one thread of one process. A dropout by itself, forward and backward, in nanoseconds for each
element: `F.dropout` alone, and inside `RandomDraws.running`. And the steps of a GPT with dropout 0.1 everywhere,
attention included: with `random=global`, with `random=local` (torch's own kernels), and of the same GPT without
dropout. Contestants take turns, in alternating order, so that a machine whose speed drifts treats them alike; figures
are medians over the turns, of processor time."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from meshwise import parallelize
from meshwise.model.random_draws import RandomDraws, SampleRows
from meshwise.reference import GPT, GPTConfig, next_token_loss

PROBABILITY = 0.1
SHAPES = {"hidden": (16, 256, 512), "attention scores": (16, 8, 256, 256), "small": (4, 64, 128)}
VOCABULARY, CONTEXT = 8192, 256


def medians(contestants: Mapping[str, Callable[[], object]], *, turns: int) -> dict[str, float]:
    """Seconds of each, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-1, turns):
        for name in sorted(contestants, reverse=turn % 2 == 1):
            started = time.process_time()
            contestants[name]()
            if turn >= 0:
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def element(shape: tuple[int, ...], *, turns: int) -> dict[str, float]:
    """Nanoseconds for each element of one dropout, forward and backward."""
    x = torch.randn(shape, requires_grad=True)
    gradient, dropout = torch.ones(shape), nn.Dropout(PROBABILITY)
    draws = RandomDraws(dropout, seed=0)
    draws.begin(0)

    def plain() -> None:
        dropout(x).backward(gradient)

    def ours() -> None:
        with draws.running(SampleRows(0, shape[0])):
            result = dropout(x)
        result.backward(gradient)

    found = medians({"F.dropout": plain, "random=global": ours}, turns=turns)
    return {name: seconds / x.numel() * 1e9 for name, seconds in found.items()}


def step(*, layers: int, width: int, rows: int, turns: int) -> dict[str, float]:
    """Seconds of a step of a GPT."""

    def stepping(plan: str, dropout: float) -> Callable[[], object]:
        shape = GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, layers=layers, heads=8, width=width, dropout=dropout)
        trainer = parallelize(lambda: GPT(shape), plan, loss=next_token_loss, lr=1e-3)
        tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
        return lambda: trainer.step((tokens[:, :-1], tokens[:, 1:]))

    contestants = {
        "random=global": stepping("dp=1", PROBABILITY),
        "random=local": stepping("dp=1 random=local", PROBABILITY),
        "no dropout": stepping("dp=1", 0.0),
    }
    return medians(contestants, turns=turns)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| tensor | elements | `F.dropout`, ns/element | `random=global`, ns/element | ratio |\n|---|---|---|---|---|"
    )
    for name, shape in SHAPES.items():
        found = element(shape, turns=flags.turns)
        theirs, ours = found["F.dropout"], found["random=global"]
        size = torch.Size(shape).numel()
        print(f"| {name} {shape} | {size} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} |", flush=True)
    found = step(layers=flags.layers, width=flags.width, rows=flags.rows, turns=flags.turns)
    base = found["random=local"]
    print("\n| step of a GPT | seconds | ratio to `random=local` |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.3f} | {seconds / base:.3f} |")


if __name__ == "__main__":
    main()
