"""A training step on one GPU, beside a plain loop: tokens/s, kernels, idle share and peak memory.

    python benchmarks/gpu_step.py                                  # small, 124M and 1.3B in bf16, all variants
    python benchmarks/gpu_step.py --models 124M --steps 10 --json figures.json
    python benchmarks/gpu_step.py --models llama-1b qwen3-moe --only eager    # models of transformers
    python benchmarks/gpu_step.py --models 1.3B --only offload     # with state on the CPU
    python benchmarks/gpu_step.py --device cpu --models tiny --steps 1    # whether it runs, without a GPU

    | plain        parameters in bf16, AdamW(fused) over fp32 masters, torch's own dropout; as meshwise, it reads the
    |              loss and the norm of the gradient, and tests the norm for being finite
    | meshwise     `precision=bf16`; dropout none, `random=local`, `random=global`; recompute none, selective, full
    | compiled     `torch.compile` of each block, of both
    | offload      optimizer and masters on the CPU; and activations too

Contestants take turns: each round runs every variant once, in alternating order. A figure is the median of the rounds.
Kernels and idle share are of one step under torch's profiler: the share of the step in which no kernel ran. `told` is
what the simulator predicts for the same step on the description --on of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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

SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "llama-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        2048,
        4,
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "vocab_size": 32768,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
        },
        1024,
        8,
    ),
}
"""Models of transformers: kind, settings, tokens of a sequence, sequences in a batch."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """One contestant."""

    who: str
    dropout: str = "none"
    recompute: str = "none"
    compiled: bool = False
    offload: str = "none"

    @property
    def name(self) -> str:
        """The contestant in the table."""
        away = {"none": "", WITH_ACTIVATIONS: ", all on the CPU"}.get(self.offload, ", optimizer on the CPU")
        return f"{self.who}{', compiled' * self.compiled}{away}"


OFFLOADED = "optimizer:cpu,masters:cpu"
WITH_ACTIVATIONS = f"{OFFLOADED},activations:cpu"


def variants(only: str) -> list[Variant]:
    """Return the contestants of --only: all, those without dropout (eager; plain: compiled too), with dropout, or with
    offloading."""
    both = [Variant("plain"), Variant("meshwise")]
    if only == "offload":
        return [*both, *(Variant("meshwise", offload=what) for what in (OFFLOADED, WITH_ACTIVATIONS))]
    if only == "eager":
        return both
    if only == "dropout":
        return [*(replace(one, dropout="local") for one in both), Variant("meshwise", dropout="global")]
    compiled = [replace(one, compiled=True) for one in both]
    if only == "plain":
        return both + compiled
    local = [replace(one, dropout="local") for one in both + compiled]
    recomputed = [Variant("meshwise", recompute=how) for how in ("selective", "full")]
    return [*both, *compiled, *local, Variant("meshwise", dropout="global"), *recomputed]


def builder_of(name: str, variant: Variant) -> Callable[[], nn.Module]:
    """Return the function that builds a model with the dropout of a variant."""
    if name in MODELS:
        shape = replace(MODELS[name][0], dropout=0.0 if variant.dropout == "none" else 0.1)
        return lambda: GPT(shape)
    kind, settings, context, _ = SHAPES[name]

    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM  # of the extra `hf`

        config = AutoConfig.for_model(kind, max_position_embeddings=context, use_cache=False, **settings)
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return model

    return build


def loss_of(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    """Return sum and number of the next-token losses, of logits or of a result of transformers."""
    return next_token_loss(output if isinstance(output, Tensor) else output.logits, batch)


def step_of(variant: Variant, name: str, batch: tuple[Tensor, Tensor], device: torch.device) -> Step:
    """Return a function that runs one step."""
    build = builder_of(name, variant)
    if variant.who == "plain":
        with device:
            model = build()
        if variant.compiled:
            blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
            for block in blocks:
                block.compile()
        return plain_step(model, batch, device)
    trainer = parallelize(build, plan_of(variant), loss=loss_of, lr=3e-4)
    return lambda: trainer.step(batch)


def plan_of(variant: Variant) -> str:
    """Return the plan of a variant of meshwise."""
    random, compiled = "local" if variant.dropout == "local" else "global", "blocks" if variant.compiled else "off"
    plan = f"dp=1 precision=bf16 random={random} recompute={variant.recompute} compile={compiled}"
    return plan if variant.offload == "none" else f"{plan} offload={variant.offload}"


def told(variant: Variant, name: str, batch: tuple[Tensor, Tensor], cluster: str) -> dict[str, float]:
    """Return tokens/s and the peak of memory that the simulator predicts; NaN for a plain loop and compiled blocks."""
    if variant.who == "plain" or variant.compiled or cluster == "none":
        return {"told tokens/s": float("nan"), "told GiB": float("nan")}
    on_host = (batch[0].cpu(), batch[1].cpu())
    subject = RehearsalSubject(builder_of(name, variant), loss_of, on_host, arguments={"lr": 3e-4})
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
        total, count = loss_of(model(batch[0]), batch)
        (total / count).backward()
        for master, parameter in zip(masters, own, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        read, norm_read = torch.stack([total.detach(), norm]).tolist()  # a training loop prints its loss
        if math.isfinite(norm_read):
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*own], [*masters])
        return float(read)

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
    name: str, order: Sequence[Variant], *, device: torch.device, rounds: int, steps: int, cluster: str, profiles: int
) -> list[dict[str, Any]]:
    """Return the figures of every variant for one model."""
    if name in MODELS:
        config, rows = MODELS[name]
        words, context = config.vocabulary, config.context
    else:
        _, settings, context, rows = SHAPES[name]
        words = settings["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(words, (rows, context + 1), generator=generator).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    found: list[dict[str, Any]] = []
    taken: dict[Variant, list[dict[str, float]]] = {variant: [] for variant in order}
    more: dict[Variant, dict[str, float]] = {one: {"kernels": 0.0, "idle": 0.0} for one in order}
    for number in range(rounds + profiles):
        for variant in order if number % 2 == 0 else reversed(order):
            with contextlib.suppress(torch.OutOfMemoryError):  # one contestant at a time has its model in memory
                torch.compiler.reset()  # which keeps 8 versions of a forward, of all contestants
                step = step_of(variant, name, batch, device)
                for _ in range(3):
                    step()
                if number < rounds:
                    taken[variant].append(measured(step, device=device, steps=steps))
                    milliseconds = taken[variant][-1]["seconds"] * 1e3
                    print(f"{name}, {variant}: {milliseconds:.1f} ms a step", file=sys.stderr, flush=True)
                else:  # last: once torch's profiler has run, every launch of a kernel takes longer
                    more[variant] = profiled(step, device=device)
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
                "tokens/s": rows * context / seconds,
                "peak GiB": max((run["peak"] for run in runs), default=float("nan")) / 2**30,
                **more[variant],
                **told(variant, name, batch, cluster),
            }
        )
    return found


def main() -> None:
    """Print the table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *SHAPES], default=["small", "124M", "1.3B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profiles", type=int, default=1, choices=(0, 1), help="0: count no kernels")
    parser.add_argument("--on", default="h100", help="description of the GPU for the simulator; none: no prediction")
    parser.add_argument(
        "--only", default="all", choices=("all", "eager", "plain", "dropout", "offload"), help="contestants"
    )
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
        order = [one for one in variants(flags.only) if model in MODELS or one.dropout == "none"]
        for row in figures(
            model,
            order,
            device=device,
            rounds=flags.rounds,
            steps=flags.steps,
            cluster=flags.on,
            profiles=flags.profiles,
        ):
            found.append(row)
            cells = [row["model"], row["contestant"], row["dropout"], row["recompute"], f"{row['tokens/s']:,.0f}"]
            cells += [f"{row['told tokens/s']:,.0f}", f"{row['kernels']:.0f}", f"{row['idle']:.0%}"]
            cells += [f"{row['peak GiB']:.2f}", f"{row['told GiB']:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
