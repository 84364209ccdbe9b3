"""Validation loss of the demo job from 4 replicas at equal samples, under every way to send less, over five seeds.

    python benchmarks/convergence.py --output benchmarks/convergence.csv

A row of the CSV file is one run: contestant, seed, steps, validation loss at the end. Runs that are in the file already
are not repeated, so `--runs 1` makes one more run at a time. The table has the mean of the seeds, and the mean and
spread of the ratio to AdamW of the same seed, which has the same first parameters and the same samples."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
CONTESTANTS: dict[str, tuple[str, ...]] = {
    "AdamW": ("--plan", "dp=4"),
    "1-bit Adam, warmup=80": (
        *("--plan", "dp=4", "--optimizer.name", "OneBitAdam", "--optimizer.arguments", "warmup=80"),
    ),
    "PowerSGD, rank 4": ("--plan", "dp=4 wire=powersgd:4"),
    "PowerSGD, rank 16": ("--plan", "dp=4 wire=powersgd:16"),
    "local SGD, every=2": ("--plan", "dp=4 sync=local every=2"),
    "local SGD, every=5": ("--plan", "dp=4 sync=local every=5"),
    "DiLoCo, every=2": (*("--plan", "dp=4 sync=diloco every=2", "--train.sync", "outer_lr=1.0", "outer_momentum=0.3"),),
    "DiLoCo, every=20": (
        *("--plan", "dp=4 sync=diloco every=20", "--train.sync", "outer_lr=1.0", "outer_momentum=0.3"),
    ),
    "DiLoCo, every=20, int8": (
        *("--plan", "dp=4 sync=diloco every=20 wire=int8", "--train.sync", "outer_lr=1.0", "outer_momentum=0.3"),
    ),
    "DiLoCo, every=20, int4": (
        *("--plan", "dp=4 sync=diloco every=20 wire=int4", "--train.sync", "outer_lr=1.0", "outer_momentum=0.3"),
    ),
}


def main() -> None:
    """Make the missing runs, and print the table of all runs in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1000, help="most runs of this call")
    parser.add_argument("--output", type=Path, default=Path("convergence.csv"))
    arguments = parser.parse_args()
    losses: dict[tuple[str, int], float] = {}
    if arguments.output.exists():
        with arguments.output.open(newline="") as file:
            losses = {
                (row["contestant"], int(row["seed"])): float(row["loss"])
                for row in csv.DictReader(file)
                if int(row["steps"]) == arguments.steps
            }
    wanted = [(name, seed) for seed in range(arguments.seeds) for name in CONTESTANTS]
    for name, seed in [each for each in wanted if each not in losses][: arguments.runs]:
        losses[name, seed] = validation_loss(name, seed=seed, steps=arguments.steps)
        new = not arguments.output.exists()
        with arguments.output.open("a", newline="") as file:
            rows = csv.writer(file)
            rows.writerows([("contestant", "seed", "steps", "loss")] * new)
            rows.writerow((name, seed, arguments.steps, f"{losses[name, seed]:.4f}"))
    print(markdown(losses))


def validation_loss(name: str, *, seed: int, steps: int) -> float:
    """Return the validation loss at the end of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwise", "train", str(DEMO), *CONTESTANTS[name]]
        command += ["--train.output", f"{folder}/run", "--train.steps", str(steps), "--train.seed", str(seed)]
        command += ["--train.validate-every", "0", "--sample.length", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        events = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return float([event["loss"] for event in events if event["event"] == "validation"][-1])


def markdown(losses: dict[tuple[str, int], float]) -> str:
    """Return the table of the contestants that have runs, each over the seeds that it has."""
    lines = ["| contestant | seeds | mean loss | least | largest | against AdamW | spread |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|"]
    for name in dict.fromkeys(name for name, _ in losses):
        own = [loss for (other, _), loss in losses.items() if other == name]
        seeds = [seed for other, seed in losses if other == name]
        ratios = [100 * (losses[name, seed] / losses["AdamW", seed] - 1) for seed in seeds]
        spread = f"{statistics.stdev(ratios):.1f} %" if len(ratios) > 1 else ""
        lines.append(
            f"| {name} | {len(seeds)} | {statistics.mean(own):.3f} | {min(own):.3f} | {max(own):.3f} | "
            f"{statistics.mean(ratios):+.1f} % | {spread} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
