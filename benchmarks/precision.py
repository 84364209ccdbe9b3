"""Whether half precision learns what fp32 learns: the demo's job in fp32, bf16 and fp16, over several seeds.

    python benchmarks/precision.py [--seeds 4] [--steps 600] [--plan "dp=2 zero=3"] [--workers 2] [--docs PAGE]

One run says little: two runs in fp32 that differ in their seed alone end apart. So every precision is trained from each
seed, which fixes the first parameters and the order of the data, and what counts is the mean of the differences to fp32
seed by seed, beside how far two seeds are apart in fp32. Exit status 1 when a mean is more than one per cent."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from peer_table import machine, write_between_markers

JOB = Path(__file__).parent.parent / "examples" / "demo.toml"
PRECISIONS = ("fp32", "bf16", "fp16")
BAR = 0.01


@dataclass(frozen=True)
class Run:
    """Where one run ended."""

    loss: float
    """On the validation data."""

    skipped: tuple[int, ...]
    """The steps that the loss scale has cost."""


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--plan", default="dp=2 zero=3")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `precision` of this file")
    given = parser.parse_args()
    found: dict[str, list[Run]] = {precision: [] for precision in PRECISIONS}

    def train(seed: int, precision: str) -> Run:
        ended = run(f"{given.plan} precision={precision}", steps=given.steps, seed=seed)
        print(f"seed {seed} {precision}: {ended}", file=sys.stderr, flush=True)
        return ended

    pairs = list(itertools.product(range(given.seeds), PRECISIONS))
    with ThreadPoolExecutor(given.workers) as workers:
        for (_, precision), ended in zip(pairs, workers.map(train, *zip(*pairs, strict=True)), strict=True):
            found[precision].append(ended)
    text = markdown(found, steps=given.steps, plan=given.plan)
    print(text)
    if given.docs:
        write_between_markers(given.docs, text=text, table="precision")
    return int(any(abs(statistics.fmean(apart(found, precision))) > BAR for precision in PRECISIONS))


def run(plan: str, *, steps: int, seed: int) -> Run:
    """The demo's job, from one seed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        flags = ["--plan", plan, "--train.steps", str(steps), "--train.output", str(output), "--sample.length", "0"]
        flags += ["--train.seed", str(seed), "--train.validate-every", "0", "--train.validate-batches", "64"]
        command = [sys.executable, "-m", "meshwise", "train", str(JOB), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    validations = [event["loss"] for event in events if event["event"] == "validation"]
    return Run(validations[-1], tuple(event["step"] for event in events if event.get("skipped")))


def apart(found: dict[str, list[Run]], precision: str) -> list[float]:
    """How far a precision is from fp32, seed by seed, relatively."""
    return [own.loss / base.loss - 1 for own, base in zip(found[precision], found["fp32"], strict=True)]


def markdown(found: dict[str, list[Run]], *, steps: int, plan: str) -> str:
    """The table."""
    rows = ["| | validation loss | beside fp32 | seed by seed | steps left out |", "|---|---|---|---|---|"]
    for precision, runs in found.items():
        loss = statistics.fmean(one.loss for one in runs)
        left_out = statistics.fmean(len(one.skipped) for one in runs)
        beside, each = "", ""
        if precision != "fp32":
            differences = apart(found, precision)
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            beside = f"{statistics.fmean(differences):+.2%} ± {error:.2%}"
            each = ", ".join(f"{difference:+.2%}" for difference in differences)
        rows.append(f"| {precision} | {loss:.4f} | {beside} | {each} | {left_out:g} |")
    pairs = itertools.combinations((one.loss for one in found["fp32"]), 2)
    between = statistics.fmean(abs(one / other - 1) for one, other in pairs)
    return "\n".join(
        [
            *rows,
            "",
            f"- The demo's job under `{plan}`, {steps} steps, {len(found['fp32'])} seeds; ± is the standard error.",
            f"- Two runs in fp32 that differ in their seed are {between:.2%} apart on the mean.",
            f"- Machine: {machine()}.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
