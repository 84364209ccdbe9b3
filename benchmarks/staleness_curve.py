"""Validation loss against staleness: the demo job with 4 workers and a parameter server, at equal samples.

    python benchmarks/staleness_curve.py --output docs/images/staleness_curve.png

Each run is `meshwise train examples/demo.toml --plan "dp=4 server=1 staleness=K"` for 200 steps with one seed, at the
learning rate of the job and at a quarter of it. Late servers make four updates a step, each from a quarter of the rows.
The losses go to a picture, and to a CSV file beside it: lr, staleness, loss, mean and largest number of updates between
the parameters that a gradient was computed from and its application."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
RATES = ("4e-3", "1e-3")
BOUNDS = ("0", "1", "2", "4", "8", "16", "async")
STEPS = 200
Row = tuple[str, str, float, float, int]
"""Learning rate, staleness, validation loss, mean and largest number of updates that a gradient missed."""


def main() -> None:
    """Train all settings, and write the CSV file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("staleness_curve.png"))
    parser.add_argument("--draw", action="store_true", help="draw the picture from the CSV file, without training")
    arguments = parser.parse_args()
    table = arguments.output.with_suffix(".csv")
    if not arguments.draw:
        rows = [train(lr, bound) for lr, bound in itertools.product(RATES, BOUNDS)]
        with table.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("lr", "staleness", "loss", "mean_missed", "most_missed"))
            writer.writerows(rows)
    with table.open(newline="") as file:
        draw(list(csv.DictReader(file)), output=arguments.output)


def train(lr: str, bound: str) -> Row:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        words = [sys.executable, "-m", "meshwise", "train", str(DEMO), "--plan", f"dp=4 server=1 staleness={bound}"]
        words += ["--train.steps", str(STEPS), "--train.validate_every", str(STEPS), "--train.save_every", str(STEPS)]
        words += ["--sample.length", "0", "--optimizer.lr", lr, "--train.output", str(output)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return lr, bound, *figures(output)


def figures(output: Path) -> tuple[float, float, int]:
    """Return the last validation loss of a run, and the mean and largest number of updates that a gradient missed."""
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
    loss = [event["loss"] for event in events if event["event"] == "validation"][-1]
    [index] = (output / "checkpoints").glob("*/checkpoint.json")
    saved = json.loads(index.read_text("utf-8"))["extra"].get("servers", {"logs": []})
    missed = [applied - read - 1 for log in saved["logs"] for _, _, read, applied in log] or [0]
    return round(loss, 4), round(statistics.mean(missed), 2), max(missed)


def draw(rows: list[dict[str, str]], *, output: Path) -> None:
    """Draw loss against staleness, a line for each learning rate."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for lr in RATES:
        own = {row["staleness"]: float(row["loss"]) for row in rows if row["lr"] == lr}
        axes.plot([BOUNDS.index(bound) for bound in own], list(own.values()), marker="o", label=f"lr {float(lr):g}")
    axes.set_xticks(range(len(BOUNDS)), BOUNDS)
    axes.set_xlabel("staleness")
    axes.set_ylabel(f"validation loss after {STEPS} steps")
    axes.legend()
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    main()
