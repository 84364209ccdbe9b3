"""Predicted against measured, on this machine: step time and peak memory of plans that its four cores can run.

    python benchmarks/simulation.py --docs docs/simulation.md

Every plan is rehearsed and run twice, for its times and for its memory: four processes of one thread that share memory,
each of which counts its part of that. Before every fifth the machine is calibrated anew (`meshwise bench calibrate`),
because its speed moves: what a step is compared with has to be of the same minute. Takes about ten minutes on four
quiet cores."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.bench.calibrate import CalibrationEffort, calibrate
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.engine.parallelize import Options
from meshwise.plan import Plan, PlanError
from meshwise.reference.gpt import GPT, GPTConfig
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.predicted_memory import MALLOC, MeasuredRank, fullest, measure, size_text
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from peer_table import write_between_markers

STEPS = 6

GPT_SHAPE = GPTConfig(vocabulary=8192, context=128, layers=4, heads=6, width=384)
WIDTH, DEPTH = 1024, 6


def gpt() -> nn.Module:
    """A language model of 13 million parameters."""
    return GPT(GPT_SHAPE)


def mlp() -> nn.Module:
    """Square layers: nearly all products of matrices."""
    layers = [module for _ in range(DEPTH) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def next_token(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The sum of the cross-entropies."""
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def squares(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The sum of the squared errors."""
    return functional.mse_loss(output, batch[1], reduction="sum"), len(output)


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], tuple[Tensor, int]]
    rows: int

    def subject(self) -> RehearsalSubject:
        """The same on every rank."""
        if self.build is gpt:
            tokens = torch.randint(GPT_SHAPE.vocabulary, (self.rows, GPT_SHAPE.context), generator=torch.Generator())
            batch = (tokens, tokens.roll(-1, dims=1))
        else:
            values = torch.rand(self.rows, WIDTH, generator=torch.Generator())
            batch = (values, values)
        return RehearsalSubject(self.build, self.loss, batch, options=Options(example=batch))


CASES = {"gpt": Case(gpt, next_token, 32), "mlp": Case(mlp, squares, 4096)}

PLANS = (
    "dp=4",
    "dp=4 zero=1",
    "dp=4 zero=2",
    "dp=4 zero=3",
    "dp=4 microbatches=4",
    "dp=4 zero=3 microbatches=2",
    "dp=2 tp=2",
    "dp=2 tp=2 zero=1",
    "dp=2 tp=2 zero=3",
    "tp=4",
    "tp=4 tp_mode=2d",
    "dp=2 pp=2 microbatches=4 partition=params",
    "dp=2 pp=2 microbatches=8 zero=1 partition=params",
    "pp=4 microbatches=8 partition=params",
    "tp=2 pp=2 microbatches=4 partition=params",
)


def main() -> None:
    """Calibrate, rehearse, run and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=5, help="calibrate before every so-manieth plan")
    arguments = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", **MALLOC})
    found: list[Cluster] = []
    rows, refused = [], []
    for index, (name, plan) in enumerate(itertools.product(arguments.models, arguments.plans)):
        if index % arguments.every == 0:
            found.append(run(4, calibrated, args=(arguments.rounds,))[0])
        try:
            rows.append(compare(name, plan, found[-1]))
        except PlanError as error:
            refused.append(f"- `{plan}` is refused for the {name}: {error}")
        else:
            print(rows[-1], flush=True)
    time_errors, memory_errors = [row[4] for row in rows], [row[7] for row in rows]
    lines = [
        "| model | plan | predicted ms | measured ms | error | predicted | measured | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | `{plan}` | {1e3 * told:.0f} | {1e3 * took:.0f} | {100 * off:+.1f} % "
        f"| {size_text(size)} | {size_text(peak)} | {100 * wrong:+.1f} % |"
        for name, plan, told, took, off, size, peak, wrong in rows
    ]
    told = (
        f"{len(rows)} plans on {found[0].device.name}: the step time is off by {_median(time_errors)} "
        f"(median), the peak memory by {_median(memory_errors)} (median) and "
        f"{100 * max(map(abs, memory_errors)):.1f} % at most. The machine was calibrated {len(found)} times."
    )
    lines += ["", told, "", *refused]
    print("\n".join(lines))
    if arguments.docs:
        write_between_markers(arguments.docs, text="\n".join([*lines, ""]), table="predicted and measured")


def compare(name: str, plan: str, cluster: Cluster) -> tuple[str, str, float, float, float, int, int, float]:
    """One plan: model, plan, seconds predicted and measured, error, peak predicted and measured, error."""
    case, ranks = CASES[name], Plan.parse(plan).mesh().size
    prediction = predict(rehearse(case.subject(), plan=plan, ranks=ranks, shared=ranks > 1), cluster=cluster)
    measured: list[MeasuredRank] = run(ranks, timed, args=(name, plan))[0]
    lean: list[MeasuredRank] = run(ranks, taken, args=(name, plan))[0]
    size = fullest(prediction.memory).peak.bytes + int(cluster.device.own)
    peak = max(one.peak for one in lean)
    took = max(one.step for one in measured)
    return name, plan, prediction.seconds, took, prediction.seconds / took - 1, size, peak, size / peak - 1


def calibrated(world: World, rounds: int) -> Cluster:
    """On every rank."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return calibrate(world, effort=CalibrationEffort(rounds=rounds))


def timed(world: World, name: str, plan: str) -> list[MeasuredRank]:
    """On every rank, as a training keeps its memory."""
    keep_freed_memory()
    return taken(world, name, plan)


def keep_freed_memory() -> None:
    """Let the trainer set how this rank's memory is freed, which it leaves to the environment else."""
    for name in MALLOC:
        os.environ.pop(name, None)


def taken(world: World, name: str, plan: str) -> list[MeasuredRank]:
    """On every rank."""
    torch.set_num_threads(1)
    return measure(world, subject=CASES[name].subject(), plan=Plan.parse(plan), steps=STEPS)


def _median(errors: Sequence[float]) -> str:
    return f"{100 * statistics.median(map(abs, errors)):.1f} %"


if __name__ == "__main__":
    main()
