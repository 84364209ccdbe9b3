"""Whether half precision learns what fp32 learns: the demo's job, shortened, in fp32, bf16 and fp16.

    python benchmarks/precision.py [--steps 150] [--plan "dp=2 zero=3"]

Prints the last validation loss of each run, how far it is from that of fp32, and how many steps the loss scale of fp16
has cost. Exit status 1 when one is more than one per cent above.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = Path(__file__).parent.parent / "examples" / "demo.toml"
BAR = 0.01


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--plan", default="dp=2 zero=3")
    given = parser.parse_args()
    losses: dict[str, float] = {}
    print(f"{'precision':<10} {'loss':>8} {'beside fp32':>12} {'skipped':>8}")
    for precision in ("fp32", "bf16", "fp16"):
        losses[precision], skipped = run(f"{given.plan} precision={precision}", steps=given.steps)
        apart = losses[precision] / losses["fp32"] - 1
        print(f"{precision:<10} {losses[precision]:8.4f} {apart:+12.2%} {skipped:8}", flush=True)
    return int(any(loss / losses["fp32"] - 1 > BAR for loss in losses.values()))


def run(plan: str, *, steps: int) -> tuple[float, int]:
    """The validation loss at the end of a run, and how many steps were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        flags = ["--plan", plan, "--train.steps", str(steps), "--train.output", str(output), "--sample.length", "0"]
        command = [sys.executable, "-m", "meshwise", "train", str(JOB), *flags, "--train.validate-every", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    validations = [event["loss"] for event in events if event["event"] == "validation"]
    return validations[-1], sum(bool(event.get("skipped")) for event in events)


if __name__ == "__main__":
    raise SystemExit(main())
