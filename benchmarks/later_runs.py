"""Published runs of other code than Megatron-LM's of 2021: what they trained and how, by what their authors wrote.

    llm-foundry   MPT with FSDP: learned positions, biases, a tied head, fused attention, norm clipped; mixed precision
                  `DEFAULT` reduces gradients in fp32, `PURE` in bf16; `SHARD_GRAD_OP` is zero=2
    dgxc          NeMo with Megatron-Core, fused attention, sequence parallelism, a distributed optimizer (zero=1) that
                  overlaps with the passes; 340 B recomputes its attention, the others nothing. Of 15 B and 175 B
                  the collectives of tp run beside products, which no plan here can say
    torchtitan    Llama with FSDP2, what is gathered in bf16 and reduced in fp32. Rows whose recomputation is of every
                  second layer or product are left out, for no plan says that, and so is all in fp8
    megascale     the rows of Megatron-LM, as `published.py` has its runs, with what it is compared to: 6 virtual
                  stages. Recomputation is not told: as in Korthikanti et al., 2022, selective, in sequence parallel;
                  nor are micro-batches: of one sequence

Clusters are those that are shipped, as they are. Squared ReLU and GELU are one operation alike; of rotations all
features are taken, where Nemotron rotates half; norms are one kernel."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import nanotron
from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import Prediction, predict
from whole_backwards import whole_backwards

PATH = Path(__file__).with_suffix(".csv")
"""Layouts and seconds, with where they are from."""

NUMBERS = ("gpus", "tp", "pp", "virtual_stages", "zero", "sequence", "global_batch", "micro_batch")

MPT = partial(GPTConfig, vocabulary=50368, tied=True, bias=True)
NEMOTRON = partial(GPTConfig, vocabulary=256000, positions="rotary", kv_heads=8)
LLAMA = partial(GPTConfig, positions="rotary")

MODELS = {
    "mpt-125m": MPT(layers=12, width=768, heads=12),
    "mpt-350m": MPT(layers=24, width=1024, heads=16),
    "mpt-760m": MPT(layers=24, width=1536, heads=12),
    "mpt-1b": MPT(layers=24, width=2048, heads=16),
    "mpt-3b": MPT(layers=32, width=2560, heads=20),
    "mpt-7b": MPT(layers=32, width=4096, heads=32),
    "mpt-13b": MPT(layers=40, width=5120, heads=40),
    "mpt-30b": MPT(layers=48, width=7168, heads=56),
    "mpt-70b": MPT(layers=80, width=8192, heads=64),
    "gpt3-175b": MPT(vocabulary=51200, layers=96, width=12288, heads=96, dropout=0.1),
    "nemotron4-15b": NEMOTRON(layers=32, width=6144, heads=48),
    "nemotron4-340b": NEMOTRON(layers=96, width=18432, heads=96),
    "llama2-13b": LLAMA(vocabulary=32000, layers=40, width=5120, heads=40),
    "llama2-70b": LLAMA(vocabulary=32000, layers=80, width=8192, heads=64, kv_heads=8),
    "llama3-70b": LLAMA(vocabulary=128256, layers=80, width=8192, heads=64, kv_heads=8),
}
"""But for the length of a sequence."""

GATED = {"llama2-13b": 13824, "llama2-70b": 28672, "llama3-70b": 28672}
"""Hidden features of models whose MLP has a gate."""


@dataclass(frozen=True)
class Run:
    """A row of the file."""

    source: str
    model: str
    cluster: str
    gpus: int
    tp: int
    pp: int
    virtual_stages: int
    zero: int
    sequence: int
    global_batch: int
    micro_batch: int
    recompute: str
    wire: str
    seconds: float
    memory: float = 0.0
    """Not published."""

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def plan(self) -> str:
        """As a plan of ours."""
        words = [
            f"dp={self.dp} tp={self.tp} pp={self.pp} zero={self.zero} recompute={self.recompute} precision=bf16",
            f"microbatches={self.global_batch // (self.dp * self.micro_batch)} wire={self.wire} random=local",
        ]
        if self.tp > 1:
            words.append("sequence_parallel=1")
        if self.pp > 1:
            words.append(f"virtual_stages={self.virtual_stages} schedule=interleaved partition=params")
        return " ".join(words)

    @property
    def name(self) -> str:
        """Beside the plan."""
        return f"{self.model}  {self.sequence}  {self.cluster}"

    @property
    def starts(self) -> tuple[str, ...]:
        """The blocks that stages begin with, but for the first: each has as many."""
        stages = self.pp * self.virtual_stages
        return tuple(f"blocks.{n * MODELS[self.model].layers // stages}" for n in range(1, stages))


def runs(*sources: str, cluster: str) -> Iterator[Run]:
    """The rows of these sources on a kind of cluster."""
    with PATH.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["source"] in sources and line["cluster"] == cluster:
                gpus, tp, pp, virtual, zero, sequence, batch, micro_batch = (int(line[key]) for key in NUMBERS)
                yield Run(
                    line["source"], line["model"], cluster, gpus, tp, pp, virtual, zero, sequence, batch, micro_batch,
                    line["recompute"], line["wire"], float(line["iter_time_s"]),
                )  # fmt: skip


def build(model: str, sequence: int) -> nn.Module:
    """The reference model in that shape."""
    config = dataclasses.replace(MODELS[model], context=sequence)
    made = GPT(config)
    if model in GATED:
        shape = nanotron.Llama(config.layers, config.width, config.heads, GATED[model], tied=False)
        for block in made.blocks:
            block.mlp = nanotron.Gated(shape)
    return made


def predicted(run: Run) -> Prediction:
    """What is said of it, on the cluster as it is shipped."""
    tokens = torch.empty(run.global_batch, run.sequence, dtype=torch.long, device="meta")
    options = Options(clip_norm=1.0, cut=CutOptions(at=run.starts))
    subject = RehearsalSubject(
        partial(build, run.model, run.sequence), next_token_loss, (tokens, tokens), options=options
    )
    with whole_backwards(run.plan) as plan:
        rehearsal = rehearse(subject, plan=plan, ranks=run.gpus, device="cuda")
    return predict(rehearsal, cluster=parse_cluster(f"{-(-run.gpus // 8)}x8 {run.cluster}"))
