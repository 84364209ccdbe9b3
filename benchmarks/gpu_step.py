"""A training step on one GPU, beside a plain loop: tokens/s, kernels, idle share and peak memory.

    python benchmarks/gpu_step.py                                  # GPT 124M and 1.3B in bf16, all variants
    python benchmarks/gpu_step.py --models 124M --steps 10 --json figures.json
    python benchmarks/gpu_step.py --device cpu --models tiny --steps 1    # whether it runs, without a GPU

    | plain        parameters in bf16, AdamW(fused) over fp32 masters, torch's own dropout
    | meshwise     `precision=bf16`; dropout none, `random=local`, `random=global`; recompute none, selective, full
    | compiled     `torch.compile` of each block, of both

Contestants take turns: each round runs every variant once, in alternating order. A figure is the median of the rounds.
Kernels and idle share are of one step under torch's profiler: the share of the step in which no kernel ran."""

from __future__ import annotations

import argparse
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

MODELS = {
    "tiny": (GPTConfig(vocabulary=256, context=64, layers=2, heads=2, width=64), 2),
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
    made = replace(config, dropout=0.0 if variant.dropout == "none" else 0.1)

    def build() -> nn.Module:
        model = GPT(made)
        if variant.compiled:
            for block in model.get_submodule("blocks").children():
                block.compile()
        return model

    if variant.who == "plain":
        return plain_step(build().to(device), batch, device)
    random = "local" if variant.dropout == "local" else "global"
    trainer = parallelize(
        build, f"dp=1 precision=bf16 random={random} recompute={variant.recompute}", loss=next_token_loss, lr=3e-4
    )
    return lambda: trainer.step(batch)


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
        streams.memory.forget_peak()
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
    name: str, order: Sequence[Variant], *, device: torch.device, rounds: int, steps: int
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
                for _ in range(2):
                    step()
                taken[variant].append(measured(step, device=device, steps=steps))
                more[variant] = profiled(step, device=device)
            except torch.OutOfMemoryError:
                more[variant] = {"kernels": 0.0, "idle": 0.0}
            step = None  # type: ignore[assignment]
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
            }
        )
    return found


def main() -> None:
    """Print the table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["124M", "1.3B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="without the compiled variants")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    device = torch.device(flags.device)
    if device.type == "cuda" and not gpu_count():
        print("skipped: torch finds no GPU here; --device cpu --models tiny --steps 1 shows that it runs")
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    titles = ("model", "contestant", "dropout", "recompute", "tokens/s", "kernels", "idle", "peak GiB")
    print(f"| {' | '.join(titles)} |\n|---|---|---|---|--:|--:|--:|--:|")
    found = []
    for model in flags.models:
        for row in figures(
            model, list(variants(eager=flags.eager)), device=device, rounds=flags.rounds, steps=flags.steps
        ):
            found.append(row)
            cells = [row["model"], row["contestant"], row["dropout"], row["recompute"], f"{row['tokens/s']:,.0f}"]
            cells += [f"{row['kernels']:.0f}", f"{row['idle']:.0%}", f"{row['peak GiB']:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
