"""Validation loss against how late or how seldom replicas agree: the demo job on 4 replicas, at equal samples.

    python benchmarks/loss_curve.py staleness --output docs/images/staleness_curve.png
    python benchmarks/loss_curve.py every --output docs/images/every_curve.png

| curve       plan                       lines                                       runs
| staleness   dp=4 server=1 staleness=K  the job's learning rate, and a quarter      200 steps, seed 0
| every       dp=4 sync=… every=H        none; local SGD, DiLoCo with three settings 200 steps, seeds 0 and 1, small

Late servers make four updates a step, each from a quarter of the rows. The losses go to a picture, and to a CSV file
beside it, a row for each run. Runs that are in the file already are not repeated. With servers a row also has the mean
and largest number of updates between the parameters that a gradient was computed from and its application."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.train.flags_and_toml import read_job
from meshwise.train.job_settings import Job
from meshwise.train.loop import train as train_job

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
STEPS = 200
COLUMNS = ("line", "value", "seed", "loss", "mean_missed", "most_missed")


@dataclass(frozen=True)
class Curve:
    """A picture: one line for each setting in `lines`, over the values of a plan's key."""

    label: str
    values: tuple[str, ...]
    lines: Mapping[str, tuple[str, ...]]
    """Words of the command by name of the line; `{}` stands for the value. A line without it has one run a seed."""
    seeds: tuple[int, ...] = (0,)
    job: tuple[str, ...] = ()
    """Words that change the demo job."""
    threads: bool = False
    """Run the ranks as threads of this process. Servers need processes: threads compute in turns, and none is late."""


SMALL = ("--model.arguments", "layers=2", "width=64", "heads=4", "positions=rotary", "--data.context", "64")
TUNED = ("--train.sync", "outer_lr=1.0", "outer_momentum=0.3")
CURVES = {
    "staleness": Curve(
        "staleness",
        ("0", "1", "2", "4", "8", "16", "async"),
        {
            f"lr {float(lr):g}": ("--plan", "dp=4 server=1 staleness={}", "--optimizer.lr", lr)
            for lr in ("4e-3", "1e-3")
        },
    ),
    "every": Curve(
        "every: steps between two agreements",
        ("1", "2", "5", "10", "20", "50", "100", "200"),
        {
            "step": ("--plan", "dp=4"),
            "local": ("--plan", "dp=4 sync=local every={}"),
            "diloco": ("--plan", "dp=4 sync=diloco every={}"),
            "diloco, outer_lr=1.0 outer_momentum=0.3": ("--plan", "dp=4 sync=diloco every={}", *TUNED),
            "the same, wire=int4": ("--plan", "dp=4 sync=diloco every={} wire=int4", *TUNED),
        },
        seeds=(0, 1),
        job=SMALL,
        threads=True,
    ),
}


def main() -> None:
    """Make the missing runs of a curve, print their table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", choices=CURVES)
    parser.add_argument("--output", type=Path, default=Path("loss_curve.png"))
    parser.add_argument("--draw", action="store_true", help="draw the picture from the CSV file, without training")
    arguments = parser.parse_args()
    curve, table = CURVES[arguments.curve], arguments.output.with_suffix(".csv")
    rows = read(table)
    wanted = [
        (seed, value, line)
        for seed, value, line in itertools.product(curve.seeds, curve.values, curve.lines)
        if value == curve.values[0] or any("{}" in word for word in curve.lines[line])
    ]
    known = {(row["line"], row["value"], row["seed"]) for row in rows}
    for seed, value, line in () if arguments.draw else wanted:
        if (line, value, str(seed)) not in known:
            with table.open("a", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([COLUMNS] * (not file.tell()))
                writer.writerow((line, value, seed, *train(curve, line, value=value, seed=seed)))
    losses = means(curve, read(table))
    print(markdown(curve, losses))
    draw(curve, losses, output=arguments.output)


def read(table: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none without the file."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def train(curve: Curve, line: str, *, value: str, seed: int) -> tuple[float, float, int]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        words = [str(DEMO), *curve.job, "--train.seed", str(seed)]
        words += [word.replace("{}", value) for word in curve.lines[line]]
        words += ["--train.steps", str(STEPS), "--train.validate_every", str(STEPS), "--train.save_every", str(STEPS)]
        words += ["--sample.length", "0", "--train.output", str(output)]
        if curve.threads:
            job = read_job(words, prog="loss_curve", kind=Job)
            with contextlib.redirect_stdout(io.StringIO()):
                run_threads(4, lambda world: train_job(world, job=job), timeout=None)
        else:
            command = [sys.executable, "-m", "meshwise", "train", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return figures(output)


def figures(output: Path) -> tuple[float, float, int]:
    """Return the last validation loss of a run, and the mean and largest number of updates that a gradient missed."""
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
    loss = [event["loss"] for event in events if event["event"] == "validation"][-1]
    [index] = (output / "checkpoints").glob("*/checkpoint.json")
    saved = json.loads(index.read_text("utf-8"))["extra"].get("servers", {"logs": []})
    missed = [applied - read - 1 for log in saved["logs"] for _, _, read, applied in log] or [0]
    return round(loss, 4), round(statistics.mean(missed), 2), max(missed)


def means(curve: Curve, rows: list[dict[str, str]]) -> dict[str, dict[str, float]]:
    """Return the mean loss over the seeds, by line and value; only of values that have a run."""
    found: dict[str, dict[str, float]] = {line: {} for line in curve.lines}
    for line, value in itertools.product(curve.lines, curve.values):
        own = [float(row["loss"]) for row in rows if (row["line"], row["value"]) == (line, value)]
        if own:
            found[line][value] = statistics.mean(own)
    return found


def markdown(curve: Curve, losses: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of mean losses, a column for each value."""
    lines = [f"| {curve.label} | {' | '.join(curve.values)} |", "|---|" + "--:|" * len(curve.values)]
    for line, own in losses.items():
        cells = (f"{own[value]:.3f}" if value in own else "" for value in curve.values)
        lines.append(f"| {line} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curve: Curve, losses: Mapping[str, Mapping[str, float]], *, output: Path) -> None:
    """Draw the mean loss against the values, as many lines as the curve has."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for line, own in losses.items():
        if len(own) == 1:
            axes.axhline(*own.values(), linestyle="--", color="grey", label=line)
            continue
        axes.plot([curve.values.index(value) for value in own], list(own.values()), marker="o", label=line)
    axes.set_xticks(range(len(curve.values)), curve.values)
    axes.set_xlabel(curve.label)
    axes.set_ylabel(f"validation loss after {STEPS} steps")
    axes.legend(fontsize="small", loc="upper center" if len(losses) > 3 else "best")
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    main()
