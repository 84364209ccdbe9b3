"""Check plans and models on GPUs against one process by `verify`, with 1, 2 and 4 ranks.

    PYTHONPATH=src python benchmarks/gpu_plans.py                          # every plan
    PYTHONPATH=src python benchmarks/gpu_plans.py --ranks 2 --only zb-h1   # plans of 2 ranks whose line has this text
    PYTHONPATH=src python benchmarks/gpu_plans.py --device cpu             # whether it runs, without GPUs

Ranks with a GPU each use NCCL, ranks that share one use gloo. Each plan is trained for three steps beside one process,
in float64 to 1e-9, and in bf16 and fp16 within their rounding. Models of transformers are left out where it is missing.
A hang is reported with the calls in which the ranks wait. The exit status is 1 if a plan fails."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwise as mw
from meshwise.comm.api.streams import gpu_count
from meshwise.optim import LAMB, LARS, Muon, Several
from meshwise.reference import GPT, GPTConfig, next_token_loss

SHAPE = GPTConfig(vocabulary=256, context=64, layers=4, heads=4, width=64)
SMALL: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
NO_DROPOUT: Mapping[str, Any] = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
MODELS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "llama": ({}, "sdpa"),
    "qwen2": ({}, "sdpa"),
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_DROPOUT}, "sdpa"),
    "gemma2": ({"head_dim": 32}, "eager"),
    "mixtral": ({"num_local_experts": 4}, "sdpa"),
    "deepseek_v3": (LATENT, "sdpa"),
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 32}, "eager"),
}
"""Models of transformers: their own settings, and their attention."""

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    **{
        kind.__name__: {"optimizer": kind, "lr": 1e-3}
        for kind in (LAMB, LARS, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam)
    },
    "Muon": {
        "optimizer": Several,
        "optimizers": {"hidden": (Muon, {"lr": 0.02}), "rest": (torch.optim.AdamW, {"lr": 3e-4})},
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model under a plan."""

    plan: str
    model: str = "gpt"
    optimizer: str = ""

    def __str__(self) -> str:
        return f"{self.model} {self.optimizer}{' ' * bool(self.optimizer)}{self.plan}"


ALL = "params:cpu,optimizer:cpu,activations:cpu"
ONE = (
    *("dp=1", "dp=1 microbatches=4", "dp=1 recompute=full", "dp=1 recompute=selective", "dp=1 budget=2M"),
    *(f"dp=1 offload={what}" for what in ("optimizer:cpu", "optimizer:disk", "activations:cpu", "activations:disk")),
    *(f"dp=1 zero=3 offload={ALL}", "dp=1 precision=bf16 offload=optimizer:cpu,masters:cpu", "dp=1 deterministic=1"),
    *(f"dp=1 precision={dtype} recompute={how}" for dtype in ("bf16", "fp16") for how in ("none", "full")),
    *("dp=1 random=local", "dp=1 random=local precision=bf16 recompute=full"),
)
COMPILED = (
    *("dp=1 compile=blocks", "dp=1 compile=blocks recompute=full", "dp=1 compile=blocks precision=bf16"),
    "dp=1 compile=blocks random=local precision=bf16",
)
SPLIT = (
    *(f"dp=2 zero={zero}" for zero in range(4)),
    *(f"dp=2 zero=3 recompute=full offload={ALL}", "dp=2 zero=3 offload=params:disk,optimizer:disk"),
    *("tp=2", "tp=2 sequence_parallel=1"),
    *(f"cp=2 context={name}" for name in ("ring", "zigzag", "striped", "ulysses", "gather")),
    *(f"pp=2 microbatches=4 schedule={name}" for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(
        f"pp=2 microbatches=4 virtual_stages=2 schedule={name}"
        for name in ("interleaved", "looped", "zb-v", "dualpipev")
    ),
    *("dp=2 precision=bf16", "dp=2 zero=1 precision=fp16", "dp=2 zero=3 compile=blocks precision=bf16"),
    *("tp=2 compile=blocks", "tp=2 sequence_parallel=1 compile=blocks precision=bf16"),
    *(f"dp=2 wire={codec}" for codec in ("int8", "fp8", "1bit", "powersgd:4")),
    "dp=2 sync=local every=2",
)
FOUR = (
    *("dp=2 tp=2 zero=1", "cp=2 dp=2 zero=3", "pp=2 dp=2 microbatches=2 zero=2 schedule=zb-h1", "dp=2x2 zero=3"),
    *("tp=4 tp_mode=2d", "tp=4 tp_mode=2.5d", "cp=4 context=usp cp_heads=2", "dp=4 sync=gossip every=2"),
)


def cases(ranks: int) -> Iterator[Case]:
    """Yield the cases of a number of ranks."""
    here = MODELS if importlib.util.find_spec("transformers") else {}
    mixtures = [name for name in here if name in ("mixtral", "deepseek_v3", "gpt_oss")]
    if ranks == 1:
        yield from (Case(plan, "dropout") for plan in ONE)
        yield from (Case(plan) for plan in COMPILED)
        yield from (Case("dp=1", optimizer=name) for name in OPTIMIZERS)
        yield from (Case(plan, name) for name in here for plan in ("dp=1", "dp=1 precision=bf16 recompute=full"))
    elif ranks == 2:
        yield from (Case(plan) for plan in SPLIT)
        yield from (Case(plan, "dropout") for plan in ("dp=2 zero=3", "tp=2", "cp=2", "pp=2 microbatches=2"))
        yield from (Case(plan, optimizer=name) for name in ("LAMB", "Muon") for plan in ("dp=2 zero=1", "tp=2"))
        plans = ("dp=2 zero=3", "tp=2 sequence_parallel=1", "cp=2", "pp=2 microbatches=2", "dp=2 precision=bf16")
        yield from (Case(plan, name) for name in ("llama", "qwen2") if name in here for plan in plans)
        yield from (Case(plan, name) for name in mixtures for plan in ("dp=2 ep=2", "tp=2", "dp=2 zero=3"))
        yield from (Case("tp=2 compile=blocks precision=bf16", name) for name in here)
    else:
        yield from (Case(plan) for plan in FOUR)


def builder(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds a model."""
    if name in ("gpt", "dropout"):
        return lambda: GPT(dataclasses.replace(SHAPE, dropout=0.1 * (name == "dropout")))
    settings, attention = MODELS[name]

    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM  # of the extra `hf`

        config = AutoConfig.for_model(name, **{**SMALL, **settings})
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return model

    return build


def loss(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum and the number of the losses of a model of transformers."""
    logits = output.logits.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


def check(world: mw.World, wanted: list[Case]) -> int:
    """Print a row for each case on the first rank; return how many failed."""
    drawn = torch.randint(256, (3, 8, 65), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
    failed = 0
    for case in wanted:
        options = mw.Options(example=batches[0] if "pp=" in case.plan else None)
        training = OPTIMIZERS[case.optimizer] if case.optimizer else {"lr": 1e-3}
        how = next_token_loss if case.model in ("gpt", "dropout") else loss
        begun = time.perf_counter()
        try:
            report = mw.verify(builder(case.model), how, batches, case.plan, world=world, options=options, **training)
            row = ("ok", "") if report.ok else ("DIFFERENT", f": {report}")
        except Exception as error:  # noqa: BLE001 - the next case shall run too
            row = ("FAILED", f": {type(error).__name__}: {error}")
        failed += row[0] != "ok"
        if world.rank == 0:
            print(f"{row[0]:9} {time.perf_counter() - begun:6.1f} s  {case}{row[1]}", flush=True)
    return failed


def command() -> int:
    """Run the cases of every number of ranks, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2, 4), default=(1, 2, 4))
    parser.add_argument("--only", default="", help="text that the line of a case has to contain")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags = parser.parse_args()
    if flags.device == "cuda" and not gpu_count():
        print("skipped: torch finds no GPU here; --device cpu shows that it runs")
        return 0
    failed = 0
    for ranks in flags.ranks:
        wanted = [case for case in cases(ranks) if flags.only in str(case)]
        if wanted:
            failed += mw.run(ranks, check, args=(wanted,), device=flags.device)[0]
    print(f"{failed} failed" if failed else "every plan is the same model")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command())
