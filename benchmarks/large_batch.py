"""Loss of AdamW and LAMB at a base batch and at 16 times that batch, after the same samples, over the learning rate.

    python benchmarks/large_batch.py --output docs/images/large_batch.png

Each trial trains a small GPT on the demo data, by `meshwise batch`: 4096 samples of 32 bytes, a warm-up over the first
tenth, then a constant rate. The picture shows the mean over seeds of the mean loss of a trial's last twentieth. A CSV
file beside it has all trials: optimizer, batch, rate, seed, loss. The same command continues a run that was stopped."""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
JOB = (
    *("--plan", "microbatches=1", "--model.arguments", "layers=2", "width=48", "--data.context", "32"),
    *("--data.validation", "0", "--optimizer.betas", "0.9", "0.999", "--samples", "4096", "--minutes", "60"),
)
RATES = {
    "AdamW": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "LAMB": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1),
}
Losses = dict[tuple[str, int, float], list[float]]
"""Final loss of each seed, by optimizer, batch and rate; of a diverged trial inf."""


def main() -> None:
    """Run all trials, and write the CSV file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs=2, default=(8, 128))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/large_batch"))
    parser.add_argument("--output", type=Path, default=Path("large_batch.png"))
    arguments = parser.parse_args()
    losses: Losses = {}
    for seed in range(arguments.seeds):
        for optimizer in RATES:
            folder = arguments.folder / f"{optimizer}-{seed}"
            for (batch, rate), loss in study(optimizer, batches=arguments.batches, seed=seed, folder=folder).items():
                losses.setdefault((optimizer, batch, rate), []).append(loss)
    with arguments.output.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("optimizer", "batch", "rate", "seed", "loss"))
        rows.writerows((*key, seed, f"{loss:.4f}") for key, found in losses.items() for seed, loss in enumerate(found))
    draw(losses, output=arguments.output)
    print(markdown(losses, batches=arguments.batches))


def study(optimizer: str, *, batches: tuple[int, int], seed: int, folder: Path) -> dict[tuple[int, float], float]:
    """Return the final loss of each trial of a study, by batch and rate."""
    factors = [f"{rate / RATES[optimizer][0]:g}" for rate in RATES[optimizer]]
    given = ("--folder", str(folder), "--optimizer.name", optimizer, "--optimizer.lr", str(RATES[optimizer][0]))
    sizes = ("--batches", *map(str, batches), "--factors", *factors, "--train.seed", str(seed))
    subprocess.run([sys.executable, "-m", "meshwise", "batch", str(DEMO), *JOB, *given, *sizes], check=True)
    with (folder / "study.csv").open(newline="") as file:
        return {(int(row["batch"]), float(row["lr"])): float(row["final loss"]) for row in csv.DictReader(file)}


def best(losses: Losses, *, optimizer: str, batch: int) -> tuple[float, list[float]]:
    """Return the rate with the lowest mean loss, and its losses."""
    found = {rate: seeds for (name, size, rate), seeds in losses.items() if (name, size) == (optimizer, batch)}
    return min(found.items(), key=lambda one: statistics.mean(one[1]))


def draw(losses: Losses, *, output: Path) -> None:
    """Draw the loss over the rate: a line for each optimizer and batch."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for color, optimizer in zip(("C0", "C1"), RATES, strict=True):
        for style, batch in zip(("o--", "s-"), sorted({key[1] for key in losses}), strict=True):
            line = [(key[2], statistics.mean(seeds)) for key, seeds in losses.items() if key[:2] == (optimizer, batch)]
            axes.plot(*zip(*sorted(line), strict=True), color + style, label=f"{optimizer}, batch {batch}")
    axes.set(xlabel="learning rate", ylabel="loss after the same samples, nats per byte", xscale="log")
    axes.set_ylim(top=3.5)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(output, dpi=110)


def markdown(losses: Losses, *, batches: tuple[int, int]) -> str:
    """Return a table of the best losses, with their rates and the range over seeds."""
    titles = [f"batch {batch}, {4096 // batch} steps | rate" for batch in batches]
    lines = [f"| | {' | '.join(titles)} | lost |", "|---|--:|--:|--:|--:|--:|"]
    for optimizer in RATES:
        cells, means = [], []
        for batch in batches:
            rate, seeds = best(losses, optimizer=optimizer, batch=batch)
            means.append(statistics.mean(seeds))
            spread = f" ({min(seeds):.2f} to {max(seeds):.2f})" if len(seeds) > 1 else ""
            cells.append(f"{means[-1]:.2f}{spread} | {rate:g}")
        lines.append(f"| {optimizer} | {' | '.join(cells)} | {means[1] - means[0]:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
