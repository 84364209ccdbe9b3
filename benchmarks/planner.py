"""The planner beside a published search: whether it chooses what exhaustive runs have found to be best.

    python benchmarks/planner.py --numbers FOLDER [--docs docs/planner.md]      the published table, cell by cell
    python benchmarks/planner.py --numbers FOLDER --checked                     three runs of another source
    python benchmarks/planner.py --speed 8.86 80.0 [--docs docs/planner.md]     how long a search over 512 GPUs takes

The table (ultrascale_playbook_best.csv) has the best layouts that nanotron's authors found by running all of theirs on
8 to 512 H100: 256 sequences of 4096 tokens a step, with a vocabulary of 131072. What nanotron could do is what is
searched here: 1F1B, layouts of tp 1 to 8 with and without sequence parallelism, ZeRO 0 and 1, micro-batches of 1, 2, 4
and 8 sequences, nothing recomputed. And it is priced as nanotron works, by its sources (huggingface/nanotron@c2528430):

    kernels      norms and rotations are one kernel each (Triton, flash-attn), nothing else is fused
    cut          `build_model` fills a stage until its products pass its share; neither the loss nor attention counts
    gradients    added up and reduced in fp32; ZeRO 1 reduces them to every rank (`reduce_scatter=False`: "too memory
                 hungry"), then gathers, so a reduce-scatter between nodes moves twice what it would
    operands     what tp gathers is kept for the backward (the memory published with tp = 8 holds it)
    overlap      none: the four rows of the smallest model take as long as if nothing were hidden, and longer
    adapters     EFA (nanotron samples its counters), eight of 400 Gb/s to a node; nccl_busbw_stas00.csv has such ones
                 of another generation, measured on four nodes
    memory       as much as any published row holds

Nothing is fitted to a row, and the prices are else `h100` as it is shipped; but it was the table that chose where these
sources leave a choice or say otherwise: its memory, for `operands` and `memory`, and its times for `overlap`, first the
four of the smallest model, which therefore do not count. All rows were in view: this is no blind test. `CHECKED` has
three more runs, from comments in the authors' script.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.parallelize import Options
from meshwise.plan import Plan
from meshwise.planner.search import Candidate, Effort, Searching, search
from meshwise.planner.space import Space, parse_fixed
from meshwise.reference.gpt import GPT, GPTConfig
from meshwise.reference.loss import next_token_loss
from meshwise.simulate.clock import predict
from meshwise.simulate.cluster import Cluster, parse_cluster
from meshwise.simulate.rehearsal import Subject, rehearse
from meshwise.tensor.matmul import Streaming
from peer_table import write_between_markers

SEQUENCES, CONTEXT, VOCABULARY = 256, 4096, 131072
WITHIN = 0.03
"""A published winner that is predicted to be no slower than this beside the choice counts as found."""

SEARCHED = "schedule=1f1b tp_mode=1d recompute=none offload=none partition=time"
PEAK = 989e12
"""Of an H100 in bf16, which the published utilisation is of."""


@dataclass(frozen=True)
class Llama:
    """A model of the table."""

    layers: int
    width: int
    heads: int
    hidden: int
    tied: bool

    @property
    def flops(self) -> int:
        """Of a step, by the published formula: all products of the forward three times, attention in full."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * CONTEXT * self.width
        return 6 * (self.layers * block + VOCABULARY * self.width) * SEQUENCES * CONTEXT


MODELS = {
    "1.34": Llama(16, 2048, 32, 8192, tied=True),
    "3.57": Llama(28, 3072, 32, 8192, tied=True),
    "8.86": Llama(32, 4096, 32, 14336, tied=False),
    "80.0": Llama(80, 8192, 64, 28672, tied=False),
}
"""By billions of parameters, as nanotron's script for these runs builds them."""

CHECKED = ((2, 3, 363.66e12), (4, 9, 345.51e12), (8, 18, 279.50e12))
"""Of the model of 3.57 billion without replicas: tp, sequences of its only micro-batch, flops per second and GPU."""

FITTED = "1.34"
"""The model whose rows chose how nanotron is priced."""

FABRIC, SMALLEST = "P6-B200 (NVLink5 + 8x400Gb EFAv4)", 2**23
"""Its measurements, from as many bytes on as are more than a matter of latency."""


class Gated(nn.Module):
    """An MLP with a gate."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.hidden, bias=False)
        self.up = nn.Linear(model.width, model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Rotation(nn.Module):
    """A rotation in one kernel: everything is read once and written once."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(CONTEXT, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, heads, T, width) to the same: without values it is all one what they are."""
        turned: Tensor = x * self.table.to(x.dtype)
        return turned


def build(model: Llama) -> nn.Module:
    """The reference model, whose norms are one kernel, with gated MLPs and rotations that are."""
    config = GPTConfig(
        vocabulary=VOCABULARY,
        context=CONTEXT,
        layers=model.layers,
        heads=model.heads,
        width=model.width,
        positions="rotary",
        tied=model.tied,
    )
    made = GPT(config)
    for block in made.blocks:
        block.mlp = Gated(model)
        block.get_submodule("attention").register_module("rotary", Rotation(config.head_width))
    return made


def subject(model: Llama, *, sequences: int = SEQUENCES) -> Subject:
    """The model and a step's batch, without values."""
    tokens = torch.empty(sequences, CONTEXT, dtype=torch.long, device="meta")
    options = Options(clip_norm=1.0, streaming=Streaming(keep=True))
    return Subject(partial(build, model), next_token_loss, (tokens, tokens), options=options)


def begins(model: Llama, stages: int) -> tuple[str, ...]:
    """What each stage but the first begins with, by nanotron's rule: what passes a stage's share ends it."""
    block = 4 * model.width**2 + 3 * model.width * model.hidden
    costs = {"embedding": 0, **{f"blocks.{n}": block for n in range(model.layers)}, "norm": 0, "head": 0}
    costs["head"] = VOCABULARY * model.width
    found: list[str] = []
    passed, total = False, 0
    for name, cost in costs.items():
        if passed:
            found.append(name)
        total += cost
        passed = total * stages > sum(costs.values()) * (len(found) + 1)
    return tuple(found)


def space(ranks: int, model: Llama, *, published: bool) -> Space:
    """What nanotron could do, or all that can be done here."""
    base = Plan(dp=None, precision="bf16", wire="fp32" if published else "auto")
    made = Space(base, ranks=ranks, node=8, batch=SEQUENCES, pieces=ranks)
    if not published:
        return made
    return dataclasses.replace(made, fixed=parse_fixed(SEARCHED), lean={}, tiers={}, begins=partial(begins, model))


def nanotron(nodes: int, numbers: Path) -> Cluster:
    """The published machines, as nanotron uses them."""
    base = parse_cluster(f"{nodes}x8 h100")
    with (numbers / "nccl_busbw_stas00.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["system"] == FABRIC and line["nodes"] == "4"]
    points = [(float(line["size_bytes"]), float(line["busbw_GBps"]) * 1e9) for line in lines]
    each = tuple((size / base.adapters, rate / base.adapters) for size, rate in points if size >= SMALLEST)
    twice = {"reduce_scatter": tuple((size, rate / 2) for size, rate in each)}
    device = dataclasses.replace(base.device, fused=1.0)
    between = dataclasses.replace(base.between, bandwidth=each, collectives=twice)
    return dataclasses.replace(base, device=device, between=between, overlap=False)


def checked(numbers: Path) -> None:
    """The runs of `CHECKED`, predicted."""
    model = MODELS["3.57"]
    cluster = nanotron(1, numbers)
    for tp, sequences, rate in CHECKED:
        plan = f"tp={tp} sequence_parallel=1 precision=bf16 wire=fp32"
        rehearsal = rehearse(subject(model, sequences=sequences), plan=plan, ranks=tp, device="cuda")
        seconds = predict(rehearsal, cluster=cluster).seconds
        measured = model.flops * sequences / SEQUENCES / tp / rate
        print(
            f"{plan}, {sequences} sequences: {seconds:.3f} s, measured {measured:.3f} s, {seconds / measured - 1:+.1%}"
        )


def cell(line: dict[str, str], *, cluster: Cluster, limit: float, rehearsals: int) -> tuple[Candidate, Candidate]:
    """The choice for a row of the table, and what is predicted of the published winner."""
    ranks, tp = int(line["gpus"]), int(line["tp"])
    model = MODELS[line["params_B"]]
    plan = Plan(
        dp=int(line["dp"]),
        tp=tp,
        pp=int(line["pp"]),
        zero=int(line["zero_stage"]),
        microbatches=int(line["grad_accum"]),
        sequence_parallel=int(tp > 1),
        precision="bf16",
        wire="fp32",
    )
    effort = Effort(top=1, rehearsals=rehearsals, workers=os.cpu_count() or 1)
    within = space(ranks, model, published=True)
    with Searching(subject(model), cluster=cluster, space=within, limit=limit, effort=effort) as searching:
        for _ in searching.run(tiers=False):
            pass
        return searching.survey.best()[0], searching.rehearsed(plan)


def table(numbers: Path, *, rehearsals: int) -> list[str]:
    """The published table, cell by cell, as markdown."""
    rows = [
        "| model | GPUs | published | measured | predicted | GiB | predicted | chosen | predicted | published is |",
        "|---|--:|---|--:|--:|--:|--:|---|--:|---|",
    ]
    with (numbers / "ultrascale_playbook_best.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    most = max(float(line["memory_GB"]) for line in lines) * 2**30
    good: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        cluster = nanotron(int(line["nodes"]), numbers)
        limit = most + cluster.device.own
        chosen, published = cell(line, cluster=cluster, limit=limit, rehearsals=rehearsals)
        fits = published.figures.memory <= limit
        slower = published.figures.seconds / chosen.figures.seconds - 1
        same = chosen.plan == published.plan
        good[line["params_B"]].append(same or (fits and slower <= WITHIN))
        measured = MODELS[line["params_B"]].flops / (int(line["gpus"]) * PEAK * float(line["mfu_pct"]) / 100)
        told = "the choice" if same else f"{100 * slower:+.1f} %{'' if fits else ', does not fit'}"
        cells = (
            f"{line['params_B']} B",
            line["gpus"],
            f"`{_short(published)}`",
            f"{measured:.3f} s",
            f"{published.figures.seconds:.3f} s",
            line["memory_GB"],
            f"{(published.figures.memory - cluster.device.own) / 2**30:.2f}",
            f"`{_short(chosen)}`",
            f"{chosen.figures.seconds:.3f} s",
            told,
        )
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    others = [one for model, found in good.items() if model != FITTED for one in found]
    share = f"{sum(others)} of {len(others)} cells ({100 * sum(others) / len(others):.0f} %)"
    fitted = f"{sum(good[FITTED])} of the {len(good[FITTED])} of the smallest model, which count as fitted"
    rows += ["", f"The choice is the published winner, or that is within 3 % of it, in {share}, and in {fitted}."]
    return rows


def _short(candidate: Candidate) -> str:
    """A plan without what all of the table have."""
    return " ".join(word for word in str(candidate.plan).split() if not word.startswith(("precision", "wire")))


def speed(name: str, *, workers: int) -> str:
    """Search everything for a model on 512 GPUs; a row of the table of how long that takes."""
    cluster = parse_cluster("64x8 h100")
    began, before = time.monotonic(), os.times()
    effort = Effort(workers=workers)
    within = space(512, MODELS[name], published=False)
    *_, found = search(subject(MODELS[name]), cluster=cluster, space=within, limit=cluster.device.memory, effort=effort)
    seconds, after = time.monotonic() - began, os.times()
    spent = sum(after[:4]) - sum(before[:4])
    best = found.best()[0]
    print(f"best of {name} B: {best.figures.seconds:.3f} s, {best.plan}; {found.proven} proven")
    cells = (f"{name} B", workers, len(found.candidates), found.rehearsals, f"{seconds:.0f} s", f"{spent:.0f} s")
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Make the table, or take the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--rehearsals", type=int, default=8)
    parser.add_argument("--speed", nargs="+", choices=MODELS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checked", action="store_true")
    arguments = parser.parse_args()
    if arguments.speed:
        titles = "| model | workers | plans | rehearsed | took | of processors |"
        lines = [
            titles,
            "|---|--:|--:|--:|--:|--:|",
            *(speed(name, workers=arguments.workers) for name in arguments.speed),
        ]
        print("\n".join(lines))
        if arguments.docs:
            write_between_markers(arguments.docs, text="\n".join([*lines, ""]), table="how long")
    if arguments.checked:
        checked(arguments.numbers)
    elif arguments.numbers:
        rows = table(arguments.numbers, rehearsals=arguments.rehearsals)
        print(rows[-1])
        if arguments.docs:
            write_between_markers(arguments.docs, text="\n".join([*rows, ""]), table="published and chosen")


if __name__ == "__main__":
    main()
