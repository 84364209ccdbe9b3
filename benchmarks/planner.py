"""The planner beside a published search: whether it chooses what exhaustive runs have found to be best.

    python benchmarks/planner.py --numbers FOLDER [--docs docs/planner.md]      the published table, cell by cell
    python benchmarks/planner.py --speed                                        how long a search over 512 GPUs takes

The table (ultrascale_playbook_best.csv) has the best layouts that nanotron's authors found by running all of theirs on
8 to 512 H100: 256 sequences of 4096 tokens a step, with a vocabulary of 131072 (the numbers of parameters follow from
no other). What nanotron could do is what is searched here: 1F1B, layouts of tp 1 to 8 with and without sequence
parallelism, ZeRO 0 and 1, micro-batches of 1, 2, 4 and 8 sequences, nothing recomputed, gradients reduced in fp32.
Nothing was fitted on these rows.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.planner.search import Candidate, Effort, Searching, search
from meshwise.planner.space import Space, parse_fixed
from meshwise.reference.gpt import GPT, GPTConfig
from meshwise.reference.loss import next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import Subject
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


def build(model: Llama) -> nn.Module:
    """The reference model with rotary positions, gated MLPs and norms without a mean."""
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
        block.attention_norm = nn.RMSNorm(model.width)
        block.mlp_norm = nn.RMSNorm(model.width)
    made.register_module("norm", nn.RMSNorm(model.width))
    return made


def subject(model: Llama) -> Subject:
    """The model and a step's batch, without values."""
    tokens = torch.empty(SEQUENCES, CONTEXT, dtype=torch.long, device="meta")
    return Subject(partial(build, model), next_token_loss, (tokens, tokens))


def space(ranks: int, *, published: bool) -> Space:
    """What nanotron could do, or all that can be done here."""
    base = Plan(dp=None, precision="bf16", wire="fp32" if published else "auto")
    made = Space(base, ranks=ranks, node=8, batch=SEQUENCES, pieces=ranks)
    return dataclasses.replace(made, fixed=parse_fixed(SEARCHED), lean={}, tiers={}) if published else made


def cell(line: dict[str, str], *, rehearsals: int) -> tuple[Candidate | None, Candidate]:
    """The choice for a row of the table, and what is predicted of the published winner."""
    ranks, tp = int(line["gpus"]), int(line["tp"])
    cluster = parse_cluster(f"{line['nodes']}x8 h100")
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
    within = space(ranks, published=True)
    with Searching(
        subject(MODELS[line["params_B"]]), cluster=cluster, space=within, limit=cluster.device.memory, effort=effort
    ) as searching:
        for _ in searching.run(tiers=False):
            pass
        best = searching.survey.best()
        return (best[0] if best else None), searching.rehearsed(plan)


def table(numbers: Path, *, rehearsals: int) -> list[str]:
    """The published table, cell by cell, as markdown."""
    rows = [
        "| model | GPUs | published | measured | predicted | chosen | predicted | published is |",
        "|---|--:|---|--:|--:|---|--:|---|",
    ]
    found = 0
    with (numbers / "ultrascale_playbook_best.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        chosen, published = cell(line, rehearsals=rehearsals)
        assert chosen is not None
        fits = published.figures.memory <= parse_cluster("h100").device.memory
        slower = published.figures.seconds / chosen.figures.seconds - 1
        same = chosen.plan == published.plan
        good = same or (fits and slower <= WITHIN)
        found += good
        measured = MODELS[line["params_B"]].flops / (int(line["gpus"]) * PEAK * float(line["mfu_pct"]) / 100)
        told = "the choice" if same else f"{100 * slower:+.1f} %{'' if fits else ', does not fit'}"
        cells = (
            f"{line['params_B']} B",
            line["gpus"],
            f"`{_short(published)}`",
            f"{measured:.3f} s",
            f"{published.figures.seconds:.3f} s",
            f"`{_short(chosen)}`",
            f"{chosen.figures.seconds:.3f} s",
            told,
        )
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    share = f"{found} of {len(lines)} cells ({100 * found / len(lines):.0f} %)"
    rows += ["", f"The choice is the published winner, or that is predicted within 3 % of it, in {share}."]
    return rows


def _short(candidate: Candidate) -> str:
    """A plan without what all of the table have."""
    return " ".join(word for word in str(candidate.plan).split() if not word.startswith(("precision", "wire")))


def speed(name: str, *, workers: int) -> None:
    """Search everything for a model on 512 GPUs."""
    cluster = parse_cluster("64x8 h100")
    began, processor = time.monotonic(), time.process_time()
    effort = Effort(workers=workers)
    within = space(512, published=False)
    *_, found = search(subject(MODELS[name]), cluster=cluster, space=within, limit=cluster.device.memory, effort=effort)
    children = os.times()
    print(
        f"{name} B on 512 GPUs with {effort.workers} workers: {time.monotonic() - began:.0f} s, "
        f"{time.process_time() - processor + children.children_user + children.children_system:.0f} s of processors, "
        f"{len(found.candidates)} plans, {found.rehearsals} rehearsed, the best {found.proven} proven; "
        f"best {found.best()[0].figures.seconds:.3f} s: {found.best()[0].plan}"
    )


def main() -> None:
    """Make the table, or take the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--rehearsals", type=int, default=8)
    parser.add_argument("--speed", choices=MODELS)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.speed:
        speed(arguments.speed, workers=arguments.workers)
    if arguments.numbers:
        rows = table(arguments.numbers, rehearsals=arguments.rehearsals)
        print(rows[-1])
        if arguments.docs:
            write_between_markers(arguments.docs, text="\n".join([*rows, ""]), table="published and chosen")


if __name__ == "__main__":
    main()
