"""A training step on one GPU, beside a plain loop: tokens/s, kernels, idle share and peak memory.

    python benchmarks/gpu_step.py                                  # small, 124M and 1.3B in bf16, all variants
    python benchmarks/gpu_step.py --models 124M --steps 10 --json figures.json
    python benchmarks/gpu_step.py --device cpu --models tiny --steps 1    # whether it runs, without a GPU

    | plain        parameters in bf16, AdamW(fused) over fp32 masters, torch's own dropout
    | meshwise     `precision=bf16`; dropout none, `random=local`, `random=global`; recompute none, selective, full
    | compiled     `torch.compile` of each block, of both

Contestants take turns: each round runs every variant once, in alternating order. A figure is the median of the rounds.
Kernels and idle share are of one step under torch's profiler: the share of the step in which no kernel ran. `told` is
what the simulator predicts for the same step on the description --on of a cluster."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwise.comm.api.streams import gpu_count, streams_of
from meshwise.engine.parallelize import parallelize
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import load
from meshwise.simulate.predicted_memory import fullest
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict

MODELS = {
    "tiny": (GPTConfig(vocabulary=256, context=64, layers=2, heads=2, width=64), 2),
    "small": (GPTConfig(vocabulary=256, context=128, layers=24, heads=4, width=256), 8),
    "124M": (GPTConfig(vocabulary=50304, context=1024, layers=12, heads=12, width=768, tied=True), 16),
    "1.3B": (GPTConfig(vocabulary=50304, context=1024, layers=24, heads=16, width=2048, tied=True), 8),
}
"""Sizes, and sequences in a batch."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """One contestant."""

    who: str
    dropout: str = "none"
    recompute: str = "none"
    compiled: bool = False

    @property
    def name(self) -> str:
        """The contestant in the table."""
        return f"{self.who}{', compiled' * self.compiled}"


def variants(*, eager: bool) -> Iterator[Variant]:
    """All contestants, or all that are not compiled; the plain loop has the variants that it can run."""
    for compiled in (False,) if eager else (False, True):
        yield Variant("plain", compiled=compiled)
        yield Variant("plain", dropout="local", compiled=compiled)
        yield Variant("meshwise", compiled=compiled)
        yield Variant("meshwise", dropout="local", compiled=compiled)
    yield Variant("meshwise", dropout="global")
    yield Variant("meshwise", recompute="selective")
    yield Variant("meshwise", recompute="full")


def step_of(variant: Variant, config: GPTConfig, batch: tuple[Tensor, Tensor], device: torch.device) -> Step:
    """Return a function that runs one step."""
    made = shape_of(variant, config)
    if variant.who == "plain":
        with device:
            model = GPT(made)
        if variant.compiled:
            for block in model.get_submodule("blocks").children():
                block.compile()
        return plain_step(model, batch, device)
    trainer = parallelize(lambda: GPT(made), plan_of(variant), loss=next_token_loss, lr=3e-4)
    return lambda: trainer.step(batch)


def shape_of(variant: Variant, config: GPTConfig) -> GPTConfig:
    """Return the shape with the dropout of the variant."""
    return replace(config, dropout=0.0 if variant.dropout == "none" else 0.1)


def plan_of(variant: Variant) -> str:
    """Return the plan of a variant of meshwise."""
    random, compiled = "local" if variant.dropout == "local" else "global", "blocks" if variant.compiled else "off"
    return f"dp=1 precision=bf16 random={random} recompute={variant.recompute} compile={compiled}"


def told(variant: Variant, config: GPTConfig, batch: tuple[Tensor, Tensor], cluster: str) -> dict[str, float]:
    """Return tokens/s and the peak of memory that the simulator predicts; NaN for a plain loop and compiled blocks."""
    if variant.who == "plain" or variant.compiled:
        return {"told tokens/s": float("nan"), "told GiB": float("nan")}
    made = shape_of(variant, config)
    on_host = (batch[0].cpu(), batch[1].cpu())
    subject = RehearsalSubject(lambda: GPT(made), next_token_loss, on_host, arguments={"lr": 3e-4})
    prediction = predict(rehearse(subject, plan=plan_of(variant), ranks=1, device="cuda"), cluster=load(cluster))
    return {
        "told tokens/s": prediction.tokens_per_second,
        "told GiB": fullest(prediction.memory).peak.bytes / 2**30,
    }


def plain_step(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Step:
    """Return a step of a plain loop: bf16 parameters, fp32 masters, clipped by nothing."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-4, fused=device.type == "cuda")
    model.to(torch.bfloat16)
    own = list(model.parameters())

    def step() -> float:
        total, count = next_token_loss(model(batch[0]).float(), batch)
        (total / count).backward()
        for master, parameter in zip(masters, own, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*own], [*masters])
        return float(total.detach())  # a training loop prints its loss

    return step


def measured(step: Step, *, device: torch.device, steps: int) -> dict[str, float]:
    """Return seconds of a step, and the peak of memory in bytes."""
    streams = streams_of(device)
    if streams.memory is not None:
        streams.memory.reset_peak()
    streams.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    streams.synchronize()
    return {
        "seconds": (time.perf_counter() - begun) / steps,
        "peak": float(streams.memory.peak) if streams.memory is not None else 0.0,
    }


def profiled(step: Step, *, device: torch.device) -> dict[str, float]:
    """Return the number of kernels of one step, and the share of it in which none ran."""
    if device.type != "cuda":
        return {"kernels": 0.0, "idle": 0.0}
    streams = streams_of(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        begun = time.perf_counter()
        step()
        streams.synchronize()
        seconds = time.perf_counter() - begun
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    busy, reached = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return {"kernels": float(len(spans)), "idle": max(0.0, 1 - busy / 1e6 / seconds)}


def figures(
    name: str, order: Sequence[Variant], *, device: torch.device, rounds: int, steps: int, cluster: str
) -> list[dict[str, Any]]:
    """Return the figures of every variant for one model."""
    config, rows = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (rows, config.context + 1), generator=generator).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    found: list[dict[str, Any]] = []
    taken: dict[Variant, list[dict[str, float]]] = {variant: [] for variant in order}
    more: dict[Variant, dict[str, float]] = {}
    for number in range(rounds):
        for variant in order if number % 2 == 0 else reversed(order):
            try:  # one contestant at a time has its model in memory
                step = step_of(variant, config, batch, device)
                for _ in range(3):
                    step()
                taken[variant].append(measured(step, device=device, steps=steps))
                more[variant] = profiled(step, device=device)
            except torch.OutOfMemoryError:
                more[variant] = {"kernels": 0.0, "idle": 0.0}
            step = None  # type: ignore[assignment]
            gc.collect()
    for variant in order:
        runs = taken[variant]
        seconds = statistics.median(run["seconds"] for run in runs) if runs else float("nan")
        found.append(
            {
                "model": name,
                "contestant": variant.name,
                "dropout": variant.dropout,
                "recompute": variant.recompute,
                "tokens/s": rows * config.context / seconds,
                "peak GiB": max((run["peak"] for run in runs), default=float("nan")) / 2**30,
                **more[variant],
                **told(variant, config, batch, cluster),
            }
        )
    return found


def main() -> None:
    """Print the table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["small", "124M", "1.3B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--on", default="h100", help="description of the GPU for the simulator")
    parser.add_argument("--eager", action="store_true", help="without the compiled variants")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    device = torch.device(flags.device)
    if device.type == "cuda" and not gpu_count():
        print("skipped: torch finds no GPU here; --device cpu --models tiny --steps 1 shows that it runs")
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    titles = ("model", "contestant", "dropout", "recompute", "tokens/s", "told", "kernels", "idle", "peak GiB", "told")
    print(f"| {' | '.join(titles)} |\n|---|---|---|---|--:|--:|--:|--:|--:|--:|")
    found = []
    for model in flags.models:
        order = list(variants(eager=flags.eager))
        for row in figures(model, order, device=device, rounds=flags.rounds, steps=flags.steps, cluster=flags.on):
            found.append(row)
            cells = [row["model"], row["contestant"], row["dropout"], row["recompute"], f"{row['tokens/s']:,.0f}"]
            cells += [f"{row['told tokens/s']:,.0f}", f"{row['kernels']:.0f}", f"{row['idle']:.0%}"]
            cells += [f"{row['peak GiB']:.2f}", f"{row['told GiB']:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
