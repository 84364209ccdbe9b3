"""Validation loss of a mixture of 8 experts against a dense GPT, at equal arithmetic for each token (Switch's claim).

    python benchmarks/mixture_curve.py --output docs/images/mixture_curve.png

Each token goes to two of 8 experts that are half as large as the dense MLP, so a token takes the same arithmetic, and
the router's (Fedus et al., arXiv 2101.03961). Biases of the router keep the load even. Both models train on the demo
data with the optimizer, batches and seeds of examples/demo.toml, on one process. The curves go to a picture, and to a
CSV file beside it: model, seed, step, loss."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
SIZES = ("layers=4", "width=96", "heads=4", "positions=rotary")
MODELS = {
    "dense": ("--model.arguments", *SIZES),
    "8 experts": (
        *("--model.name", "mixture", "--model.arguments", *SIZES, "experts=8", "choices=2"),
        *("mlp_ratio=2", "routing=biased", "--train.expert-bias-rate", "0.001"),
    ),
}
Curve = dict[int, float]
"""Validation loss in nats per byte by step."""


def main() -> None:
    """Train all models, and write the CSV file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("mixture_curve.png"))
    arguments = parser.parse_args()
    curves = {
        (model, seed): train(model, seed=seed, steps=arguments.steps)
        for seed in range(arguments.seeds)
        for model in MODELS
    }
    with arguments.output.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("model", "seed", "step", "loss"))
        rows.writerows((*key, step, f"{loss:.4f}") for key, curve in curves.items() for step, loss in curve.items())
    draw(curves, output=arguments.output)
    print(markdown(curves))


def train(model: str, *, seed: int, steps: int) -> Curve:
    """Return the validation losses of a run: the cross-entropy alone."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwise", "train", str(DEMO), "--plan", "dp=1", *MODELS[model]]
        command += ["--train.output", f"{folder}/run", "--train.steps", str(steps), "--train.seed", str(seed)]
        command += ["--train.validate-every", "50", "--sample.length", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        events = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return {event["step"]: event["loss"] for event in events if event["event"] == "validation"}


def reached(curve: Curve, loss: float) -> float:
    """Return the step at which a curve first reaches `loss`, interpolated between validations."""
    points = list(curve.items())
    for (before, high), (step, low) in itertools.pairwise(points):
        if low <= loss:
            return before + (step - before) * (high - loss) / (high - low)
    return float("nan")


def markdown(curves: dict[tuple[str, int], Curve]) -> str:
    """Return the table: means over the seeds."""
    lines = ["| step | dense | 8 experts |", "|--:|--:|--:|"]
    seeds = sorted({seed for _, seed in curves})
    for step in curves["dense", 0]:
        means = [statistics.mean(curves[model, seed][step] for seed in seeds) for model in MODELS]
        lines.append(f"| {step} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    for seed in seeds:
        loss = list(curves["dense", seed].values())[-1]
        at = reached(curves["8 experts", seed], loss)
        lines.append(f"\nSeed {seed}: the mixture reaches the dense model's last loss, {loss:.3f}, at step {at:.0f}.")
    return "\n".join(lines)


def draw(curves: dict[tuple[str, int], Curve], *, output: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (model, seed), curve in curves.items():
        color, line = "C0" if model == "dense" else "C1", "-" if seed == 0 else "--"
        axes.plot(list(curve), list(curve.values()), label=f"{model}, seed {seed}", color=color, linestyle=line)
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", title="Equal arithmetic for each token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
