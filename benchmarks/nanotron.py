"""nanotron as a model, a cluster and a price: how the runs of the ultra-scale playbook worked, by its sources.

Sources: [s], huggingface/nanotron, of which branch nouamane/bench2 (67c5ebb6) started those runs, and c2528430;
[p], the playbook's own pages, as kept in vinjn/nanotron-ultrascale-playbook@924e4d0b; [e], nccl-tests on the same kind
of nodes, p5.48xlarge, crazyguitar/aws-gpu-communication-benchmark@fd167f97: data/nccl_all_reduce.csv.

    kernels    norms and rotations are one kernel each (Triton, flash-attn), nothing else is fused; queries, keys and
               values are copied to lie one after another, keys and values once more; gate and up are one product [s]
    cut        `build_model` fills a stage until its products pass its share; neither loss nor attention counts [s].
               Where they come to just the share, as in the smallest model only, its runs say that the stage is full:
               with one block more, four of them would have held more than they had reserved
    tp         communicates beside products where it can, and gathers again backward (`tp_recompute_allgather`); tokens
               are the first dim, so what is gathered lies where it arrives and nothing is put together by copies [s]
    gradients  are added up and reduced in fp32; those of one backward are all there, in bf16, until it is over [s]
    ZeRO 0     is DDP, with its buckets in bf16 beside: reductions are hidden behind the last backward. A bucket is
               full with 25 MiB in bf16, and is reduced in fp32 [s]: so messages have the size of one to five products
    messages   over nodes are the slower the smaller they are: by the published shape for so many nodes [e], through
               what their own cluster took for 1 GiB. Twice the nodes take twice the bytes as quickly (from 8 to 16 and
               to 32 to within 6 %, median): so it is for 64, which are not published
    ZeRO 1     is not (`make_ddp`): after the last backward all gradients are reduced to every rank, normed and clipped
               whole on every rank, and parameters gathered with a copy for every tensor of every rank [s]
    adapters   as quick as their cluster moved 1 GiB over so many nodes, which every run measured before it began
               (`measure_bandwidth` [s]): the best runs were published, so the 95th percentile of them [p]
    counted    the published utilisation counts six flops for each parameter and token, those of an embedding that is
               not the head too; a tied one is two parameters where a pipeline has it on two stages. So the same
               utilisation is a longer step there. Tokens per second, which the page has too, say so in all but one
               of its 1,218 runs of 15 % or more [p]
    memory     is what torch's allocator has reserved, as `reserved.py` puts it together [s]; there is as much of it as
               any published row has reserved

Fitted on the runs of the smallest model on one node, by their tokens per second and memory [p]: `LAUNCH`, `LATE`, and
the part of the peak that products reach on `h100`. Prices are else `h100` as it is shipped."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.engine.parallelize import Options
from meshwise.plan import Plan
from meshwise.planner.lower_bound import PlanFigures
from meshwise.planner.plan_search import figures_of
from meshwise.planner.plan_space import PlanSpace
from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import Cluster, Curve, parse_cluster, rate_at
from meshwise.simulate.rehearsal import Rehearsal, RehearsalSubject
from meshwise.simulate.step_prediction import Prediction, predict
from reserved import Held, reserved

SEQUENCES, CONTEXT, VOCABULARY = 256, 4096, 131072

RAN = Path(__file__).with_name("nanotron_runs.csv")
"""The layouts that were run, without what became of them: from the hover texts of the page's interactive figure [p]."""

_NODE = 8

PEAK = 989e12
"""Of an H100 in bf16, which the published utilisation is of."""

LAUNCH = 70e-6
"""Seconds that their host takes to start an operation."""

LATE = 64
"""Activations of a whole micro-batch that collectives of tp have let go and that no other tensor gets yet: what another
stream uses is given anew when the host learns that it is over, and the host is far ahead."""

REDUCED: Mapping[int, float] = {1: 461.5, 2: 436.1, 4: 219.1, 8: 192.7, 16: 188.4, 32: 194.2, 64: 177.4}
GATHERED: Mapping[int, float] = {1: 264.9, 2: 226.3, 4: 229.4, 8: 178.5, 16: 126.7, 32: 77.0, 64: 44.4}
"""Bus bandwidth in GB/s of an all-reduce and of an all-gather into a list of tensors, by nodes of eight GPUs."""

MEASURED_WITH = 2**30
"""Bytes."""

SIZES = tuple(32 * 2**20 * 2**n for n in range(9))
BY_SIZE: Mapping[int, tuple[float, ...]] = {
    1: (1.0,) * 9,
    2: (147.32, 207.00, 305.13, 364.46, 395.99, 435.14, 445.05, 465.81, 477.71),
    4: (95.38, 152.41, 229.48, 273.34, 278.41, 280.30, 347.57, 354.45, 356.99),
    8: (86.74, 103.85, 156.33, 232.09, 272.62, 274.47, 278.15, 351.32, 355.36),
    16: (74.85, 92.39, 129.20, 148.11, 223.80, 269.23, 270.91, 306.15, 356.27),
    32: (66.34, 83.60, 115.78, 137.99, 156.83, 220.08, 269.47, 302.81, 321.10),
    64: (66.34, 66.34, 83.60, 115.78, 137.99, 156.83, 220.08, 269.47, 302.81),
}
"""Bus bandwidth in GB/s of an all-reduce of so many bytes over all GPUs of as many nodes [e]."""

BUCKET = 25 * 2**20
"""Bytes in bf16 that fill a bucket of DDP."""

CLIPPED = 12
"""Bytes for each parameter that its gradient's norm and its product with a number read and write."""


@dataclass(frozen=True)
class Llama:
    """A model of the table."""

    layers: int
    width: int
    heads: int
    hidden: int
    tied: bool

    @property
    def block(self) -> int:
        """Parameters of a block's products."""
        return 4 * self.width**2 + 3 * self.width * self.hidden

    @property
    def flops(self) -> int:
        """Of a step, by the published formula: all products of the forward three times, attention in full."""
        each = self.block + 2 * CONTEXT * self.width
        return 6 * (self.layers * each + VOCABULARY * self.width) * SEQUENCES * CONTEXT

    def counted(self, plan: Plan) -> int:
        """Of a step, as the published utilisation counts them."""
        return self.flops if self.tied and plan.pp == 1 else self.counted_most

    @property
    def counted_most(self) -> int:
        """The same where embedding and head are two."""
        return self.flops + 6 * VOCABULARY * self.width * SEQUENCES * CONTEXT


MODELS = {
    "1.34": Llama(16, 2048, 32, 8192, tied=True),
    "3.57": Llama(28, 3072, 32, 8192, tied=True),
    "8.86": Llama(32, 4096, 32, 14336, tied=False),
    "80.0": Llama(80, 8192, 64, 28672, tied=False),
}
"""By billions of parameters, as nanotron's script for these runs builds them."""


class Copied(torch.autograd.Function):
    """A tensor that is copied so many times on its way, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        """The same values."""
        ctx.times = backward
        for _ in range(forward):
            x = x.clone()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The same values."""
        (gradient,) = gradients
        for _ in range(ctx.times):
            gradient = gradient.clone()
        return gradient, None, None


def copied(x: Tensor, *, forward: int, backward: int) -> Tensor:
    """Copied so many times."""
    output: Tensor = Copied.apply(x, forward, backward)
    return output


class Gated(nn.Module):
    """An MLP with a gate: one product for both, whose gradients are put together again."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.gate_up = nn.Linear(model.width, 2 * model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        gate, up = copied(self.gate_up(x), forward=0, backward=1).chunk(2, dim=-1)
        output: Tensor = self.down(functional.silu(gate) * up)
        return output


class Attention(nn.Module):
    """Causal attention: queries, keys and values are put one after another, keys and values once more, then rotated."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.head_width = model.width // model.heads
        self.heads = (model.heads, model.heads, model.heads)
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.projection = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q, k, v = copied(qkv, forward=1, backward=1).split(self.heads, dim=1)
        k, v = (copied(each, forward=2, backward=1) for each in (k, v))
        # A rotation is one kernel, which reads everything once and writes it once.
        mixed = functional.scaled_dot_product_attention(q * 1.0, k * 1.0, v, is_causal=True)
        output: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return output


def build(model: Llama) -> nn.Module:
    """The reference model, whose norms are one kernel, with nanotron's attention and MLP."""
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
        block.attention, block.mlp = Attention(model), Gated(model)
    return made


def subject(model: Llama, *, sequences: int = SEQUENCES) -> RehearsalSubject:
    """The model and a step's batch, without values."""
    tokens = torch.empty(sequences, CONTEXT, dtype=torch.long, device="meta")
    options = Options(clip_norm=1.0, tensor_rules={"blocks.*.mlp.gate_up": "colwise sections=2"})
    return RehearsalSubject(partial(build, model), next_token_loss, (tokens, tokens), options=options)


def begins(model: Llama, stages: int) -> tuple[str, ...]:
    """What each stage but the first begins with, by nanotron's rule: what passes a stage's share ends it.

    So does what comes to just that share. That happens in the smallest model only, whose runs say so (docs/planner.md);
    the source compares with >."""
    costs = {"embedding": 0, **{f"blocks.{n}": model.block for n in range(model.layers)}, "norm": 0, "head": 0}
    costs["head"] = VOCABULARY * model.width
    found: list[str] = []
    passed, total = False, 0
    for name, cost in costs.items():
        if passed:
            found.append(name)
        total += cost
        passed = total * stages >= sum(costs.values()) * (len(found) + 1)
    return tuple(found)


@dataclass(frozen=True)
class Tried(PlanSpace):
    """The plans that were run, whatever became of them."""

    tried: tuple[Plan, ...] = field(default=())

    def plans(self) -> Iterator[Plan]:
        """Those of them that nanotron's rule can cut."""
        assert self.begins is not None
        return (plan for plan in self.tried if len(self.begins(plan.pp)) == plan.pp - 1)

    def leaner(self, plan: Plan, *, tiers: bool) -> Iterator[Plan]:  # noqa: ARG002 - none was run in place of another
        """None."""
        return iter(())


def searched(ranks: int, name: str) -> PlanSpace:
    """What was run of a model on so many GPUs, less tp over nodes."""
    base, rule = Plan(dp=None, precision="bf16", wire="fp32"), partial(begins, MODELS[name])
    with RAN.open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if (line["params_B"], line["gpus"]) == (name, str(ranks))]
    plans = tuple(plan_of(line) for line in lines if int(line["tp"]) <= _NODE)
    return Tried(base, ranks, _NODE, SEQUENCES, ranks, begins=rule, tried=plans)


def plan_of(line: Mapping[str, str]) -> Plan:
    """A row of a table as a plan."""
    tp = int(line["tp"])
    return Plan(
        dp=int(line["dp"]),
        tp=tp,
        pp=int(line["pp"]),
        zero=int(line["zero_stage"]),
        microbatches=int(line["grad_accum"]),
        sequence_parallel=int(tp > 1),
        precision="bf16",
        wire="fp32",
    )


def machines(nodes: int) -> Cluster:
    """Theirs, as nanotron uses them."""
    base = parse_cluster(f"{nodes}x8 h100")
    buses = {"reduce_scatter": REDUCED[nodes] / 2, "all_gather": GATHERED[nodes]}
    each: dict[str, Curve] = {
        kind: ((MEASURED_WITH / base.adapters, 1e9 * rate / base.adapters),) for kind, rate in buses.items()
    }
    shape = dict(zip(SIZES, BY_SIZE[nodes], strict=True))
    unit = 1e9 * REDUCED[nodes] / shape[MEASURED_WITH] / base.adapters
    each["all_reduce"] = tuple((size / base.adapters, rate * unit) for size, rate in shape.items())
    free = {"cat": math.inf, "copy_": math.inf}
    device = dataclasses.replace(base.device, fused=1.0, rates={**base.device.rates, **free}, launch=LAUNCH)
    # What they measured over so many nodes has its hops in it.
    inside = dataclasses.replace(base.inside, hop=0.0)
    between = dataclasses.replace(base.between, hop=0.0, collectives=each)
    return dataclasses.replace(base, device=device, inside=inside, between=between)


def in_buckets(cluster: Cluster, *, model: Llama, plan: Plan) -> Cluster:
    """The cluster where an all-reduce of a block's gradients takes as long as DDP's buckets of them.

    Buckets are filled in the order in which gradients come. Those of an embedding or a head are one bucket."""
    here = max(1, cluster.ranks_per_node // plan.tp)
    curve = cluster.between.collectives["all_reduce"]
    square, gated = model.width**2 // plan.tp, model.width * model.hidden // plan.tp
    found = [0]
    for words in (gated, 2 * gated, square, 3 * square) * model.layers:
        if 2 * found[-1] >= BUCKET:
            found.append(0)
        found[-1] += words
    took = sum(words / rate_at(curve, size=4 * words / here) for words in found)
    word = VOCABULARY * model.width // plan.tp
    points = {model.block // plan.tp: sum(found) / took, word: rate_at(curve, size=4 * word / here)}
    curves = {"all_reduce": tuple(sorted((4 * words / here, rate) for words, rate in points.items()))}
    between = dataclasses.replace(cluster.between, collectives={**cluster.between.collectives, **curves})
    return dataclasses.replace(cluster, between=between)


def told(model: Llama, prediction: Prediction, *, room: float = math.inf) -> PlanFigures:
    """What nanotron takes for a plan, of what this project would.

    DDP's reductions are in buckets.
    Where this project reduces and scatters gradients, which `machines` prices as reducing them to every rank, ZeRO 1
    there begins after the last backward: what was hidden comes on top, and so does what it does beside. Seconds are as
    long as the published utilisation makes them where embedding and head are two, for that is what the runs were ranked
    by. Memory is what torch's allocator has reserved, as the runs report it. It gives back what nobody uses before it
    takes more than `room`."""
    plan, cluster = prediction.rehearsal.plan, prediction.cluster
    dp = plan.dp or 1
    if dp > 1 and plan.zero == 0:
        prediction = predict(prediction.rehearsal, cluster=in_buckets(cluster, model=model, plan=plan))
    figures = figures_of(prediction)
    exposed = dict(figures.exposed)
    memory = held_at_most(model, prediction.rehearsal, room=room) + int(cluster.device.own)
    if dp > 1 and plan.zero > 0:
        words = max(parameters(model, plan), key=sum)
        open_ = predict(prediction.rehearsal, cluster=dataclasses.replace(cluster, overlap=False)).exposed
        beside = len(words) * dp * cluster.device.kernel + passing(cluster, size=CLIPPED * sum(words) * (1 - 1 / dp))
        exposed["dp"] = max(exposed.get("dp", 0.0), open_.get("dp", 0.0)) + beside
    late = sum(exposed.values()) - sum(figures.exposed.values())
    ranked = (figures.seconds + late) * model.counted_most / model.counted(plan)
    return dataclasses.replace(figures, seconds=ranked, memory=max(memory, figures.memory), exposed=exposed)


def passing(cluster: Cluster, *, size: float) -> float:
    """Seconds of reading and writing so many bytes."""
    return size / rate_at(cluster.device.bandwidth, size=size)


def parameters(model: Llama, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Words of every parameter of a rank, stage by stage, in the order of the forward."""
    names = ["embedding", *(f"blocks.{n}" for n in range(model.layers)), "norm", "head"]
    bounds = [0, *map(names.index, begins(model, plan.pp)), len(names)]
    word, square, gated = VOCABULARY * model.width, model.width**2, model.width * model.hidden
    block = (model.width, *(size // plan.tp for size in (3 * square, square)))
    block = (*block, model.width, *(size // plan.tp for size in (2 * gated, gated)))
    head = () if model.tied and plan.pp == 1 else (word // plan.tp,)
    ends = {"embedding": (word // plan.tp,), "norm": (model.width,), "head": head}
    stages = (names[start:stop] for start, stop in itertools.pairwise(bounds))
    return tuple(tuple(size for name in own for size in ends.get(name, block)) for own in stages)


def held_at_most(model: Llama, rehearsal: Rehearsal, *, room: float) -> int:
    """Bytes that a rank has reserved at most. The first stage has most of activations, the last one the scores."""
    plan = rehearsal.plan
    tokens = SEQUENCES * CONTEXT // ((plan.dp or 1) * plan.microbatches)
    late = (2 * tokens * model.width,) * LATE if plan.tp > 1 else ()
    words = parameters(model, plan)
    return max(
        reserved(rehearsal, index=index, held=Held(words[index], plan.dp or 1, plan.zero, late), room=room)
        for index in {0, plan.pp - 1}
    )
