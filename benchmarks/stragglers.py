"""Seconds of a step with one slow rank, under even and under measured shares of the rows.

    python benchmarks/stragglers.py

Four ranks train a small GPT. Every row of a rank takes 5 ms of sleep in place of computation, of rank 1 `--factor`
times as long, so the cores of the machine do not matter. With `shares = "auto"` the rows change after 20 steps."""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.comm.api.world import World
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.testing import run
from meshwise.train.job_settings import DataJob, Job, ModelJob, TrainJob
from meshwise.train.loop import train

SECONDS = "SECONDS_OF_A_ROW"
STEPS = 80


def loss(output: Any, batch: Any) -> tuple[Any, Any]:
    """Return the loss of the rows, after the sleep that they take on this rank."""
    time.sleep(float(os.environ[SECONDS]) * len(batch[0]))
    return next_token_loss(output, batch)


def trained(world: World, job: Job, factor: float) -> None:
    """Train the job on this rank; rank 1 is slow."""
    os.environ[SECONDS] = str(0.005 * (factor if world.rank == 1 else 1.0))
    train(world, job=job, console=Console(file=io.StringIO()))


def main() -> None:
    """Run both jobs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=2.0)
    factor = parser.parse_args().factor
    print("| train.shares | rows of the replicas at the end | median ms of steps 41 to 80 |\n|---|---|--:|")
    for shares in ("even", "auto"):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text.txt")
            text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
            job = Job(
                model=ModelJob("gpt", {"layers": 2, "width": 32, "heads": 2}),
                data=DataJob(files=(str(text),), context=32, validation=0.0, cache=f"{folder}/cache"),
                train=TrainJob(steps=STEPS, batch=32, output=f"{folder}/run", shares=shares),
                plan=Plan(dp=4, zero=1),
                loss=f"{Path(__file__).resolve()}:loss",
            )
            run(4, trained, on="processes", args=(job, factor))
            events = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        steps = [event["tokens"] / event["rate"] for event in events if event["event"] == "step"]
        rows = [event["rows"] for event in events if event["event"] == "shares"] or [[8] * 4]
        print(
            f"| `{shares}` | {' '.join(map(str, rows[-1]))} | {1e3 * statistics.median(steps[40:]):.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
