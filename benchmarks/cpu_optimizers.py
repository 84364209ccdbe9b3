"""AdamW on the CPU: the update as tiers run it, beside torch's implementations and DeepSpeed's compiled one.

    python benchmarks/cpu_optimizers.py --python deepspeed=PATH --threads 1 4 --docs docs/benchmarks.md

All contestants update the same fp32 parameters with the same gradients in one process, in turns whose order alternates.
DeepSpeed's needs an interpreter that has it: with `--python`, everything runs in that one, our code too."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer_table import machine, write_between_markers

BYTES = 28
"""Read and written for each element: parameter, gradient and two moments are read, all but the gradient written."""

SETTINGS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OURS = "meshwise, `offload=optimizer:cpu`"


def contestants(parameters: Sequence[nn.Parameter], *, deepspeed: bool) -> dict[str, Callable[[], object]]:
    """One step of each, by name."""
    from meshwise.memory.chunked_update import ChunkedUpdate, UpdateChunk
    from meshwise.memory.tiers import Tiers
    from meshwise.plan.plan_keys import Offload

    gradients = [parameter.grad for parameter in parameters]
    chunks = [
        UpdateChunk([parameter], parameter.data, None, lambda gradient=gradient: gradient, lambda: 1.0)  # type: ignore[misc]
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    tiers = Tiers(Offload.parse("optimizer:cpu"))
    update = ChunkedUpdate(torch.optim.AdamW(parameters, fused=True, **SETTINGS), chunks=chunks, tiers=tiers)

    def ours() -> None:
        update.step(lambda _: None)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    steps: dict[str, Callable[[], object]] = {
        OURS: ours,
        "torch fused": torch.optim.AdamW(parameters, fused=True, **SETTINGS).step,
        "torch foreach": torch.optim.AdamW(parameters, foreach=True, **SETTINGS).step,
        "torch for-loop": torch.optim.AdamW(parameters, foreach=False, fused=False, **SETTINGS).step,
    }
    if deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        steps["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam(parameters, adamw_mode=True, **SETTINGS).step
    return steps


def measure(threads: int, *, elements: int, rounds: int, deepspeed: bool) -> dict[str, list[float]]:
    """Seconds of each step of each contestant, turn by turn."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(elements // 16) * 0.02) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    steps = contestants(parameters, deepspeed=deepspeed)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for name in list(steps) if turn % 2 else list(steps)[::-1]:
            started = time.perf_counter()
            steps[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def markdown(found: dict[int, dict[str, list[float]]], *, elements: int, rounds: int) -> str:
    """The table."""
    lines = [
        "| AdamW step | threads | median, s | ratio to ours (quartiles) | GB/s |",
        "|---|---|---|---|---|",
    ]
    for threads, seconds in found.items():
        for name, times in seconds.items():
            ratios = sorted(one / own for one, own in zip(times, seconds[OURS], strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4)
            rate = elements * BYTES / statistics.median(times) / 1e9
            spread = "" if name == OURS else f" ({low:.3f}-{high:.3f})"
            lines.append(f"| {name} | {threads} | {statistics.median(times):.3f} | {middle:.3f}{spread} | {rate:.1f} |")
    lines += [
        "",
        f"- Machine: {machine()}; torch {torch.__version__.partition('+')[0]}.",
        f"- {elements / 1e6:.0f} million fp32 parameters in 16 tensors, {rounds} turns of each.",
        f"- GB/s: {BYTES} bytes an element, read and written.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write into the page that `--docs` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python", default="", help="deepspeed=PATH: an interpreter that has DeepSpeed")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--docs", type=Path, help="write the table between the markers `cpu-optimizers` of this file")
    arguments = parser.parse_args()
    deepspeed = arguments.python.startswith("deepspeed=")
    if arguments.inside:
        sizes = {"elements": arguments.elements, "rounds": arguments.rounds}
        print("RESULT " + json.dumps(measure(arguments.inside, deepspeed=deepspeed, **sizes)), flush=True)
        return
    python = arguments.python.partition("=")[2] or sys.executable
    found = {}
    for threads in arguments.threads:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent / "src"), str(here)])
        words = ["--elements", str(arguments.elements), "--rounds", str(arguments.rounds), "--python", arguments.python]
        run = subprocess.run(
            [python, __file__, "--inside", str(threads), *words],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        [line] = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        found[threads] = json.loads(line.removeprefix("RESULT "))
    text = markdown(found, elements=arguments.elements, rounds=arguments.rounds)
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="cpu-optimizers")


if __name__ == "__main__":
    main()
