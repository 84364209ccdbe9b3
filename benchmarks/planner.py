"""The planner beside a published search: whether it chooses what exhaustive runs have found to be best.

    python benchmarks/planner.py --numbers FOLDER [--docs docs/planner.md]      the published table, cell by cell
    python benchmarks/planner.py --checked                                      three runs of another source
    python benchmarks/planner.py --speed 8.86 80.0 [--docs docs/planner.md]     how long a search over 512 GPUs takes

The table (ultrascale_playbook_best.csv) has the best layouts that nanotron's authors found by running all of theirs on
8 to 512 H100: 256 sequences of 4096 tokens a step, with a vocabulary of 131072. What they ran, which nanotron_runs.csv
lists without outcomes, is what is searched here, less tp over nodes; and it is priced as nanotron works, which
`nanotron.py` lists with its sources.

One number is fitted, on runs of the smallest model on one node, so that model's cells do not count. All rows of the
table were in view when these prices were chosen: this is no blind test. `CHECKED` has three more runs, from comments in
the authors' script."""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from meshwise.plan import Plan
from meshwise.planner.plan_search import Candidate, PlanSearch, SearchEffort, search
from meshwise.planner.plan_space import PlanSpace
from meshwise.simulate.cluster import Cluster, parse_cluster
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.step_prediction import predict
from nanotron import MODELS, PEAK, SEQUENCES, machines, plan_of, searched, subject, told
from peer_table import write_between_markers

WITHIN = 0.03
"""A cell is found where the choice is predicted to take as long as the published winner, give or take this part of its
time; strictly, where that one is predicted to fit as well, and to be no slower than by this part of the choice's time.
"""

CHECKED = ((2, 3, 363.66e12), (4, 9, 345.51e12), (8, 18, 279.50e12))
"""Of the model of 3.57 billion without replicas: tp, sequences of its only micro-batch, flops per second and GPU."""

FITTED = "1.34"
"""The model whose runs chose how nanotron is priced."""


def checked() -> None:
    """The runs of `CHECKED`, predicted."""
    model = MODELS["3.57"]
    cluster = machines(1)
    for tp, sequences, rate in CHECKED:
        plan = f"tp={tp} sequence_parallel=1 precision=bf16 wire=fp32"
        rehearsal = rehearse(subject(model, sequences=sequences), plan=plan, ranks=tp, device="cuda")
        seconds = told(model, predict(rehearsal, cluster=cluster)).seconds
        seconds *= model.flops / model.counted_most
        measured = model.flops * sequences / SEQUENCES / tp / rate
        print(
            f"{plan}, {sequences} sequences: {seconds:.3f} s, measured {measured:.3f} s, {seconds / measured - 1:+.1%}"
        )


def cell(
    line: dict[str, str], *, space: PlanSpace, cluster: Cluster, limit: float, effort: SearchEffort
) -> list[Candidate]:
    """The choice for a row of the table, and what is predicted of the published winner."""
    model = MODELS[line["params_B"]]
    with PlanSearch(subject(model), cluster=cluster, space=space, limit=limit, effort=effort) as searching:
        searching.evaluate = partial(told, model, room=limit - cluster.device.own)
        for _ in searching.run(tiers=False):
            pass
        return [searching.result.best()[0], searching.rehearsed(plan_of(line))]


def table(numbers: Path, *, effort: SearchEffort) -> list[str]:
    """The published table, cell by cell, as markdown."""
    rows = [
        "| model | GPUs | published | measured | predicted | GiB | predicted | chosen | predicted | beside it |",
        "|---|--:|---|--:|--:|--:|--:|---|--:|---|",
    ]
    with (numbers / "ultrascale_playbook_best.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    most = max(float(line["memory_GB"]) for line in lines) * 2**30
    good: dict[str, list[bool]] = defaultdict(list)
    strictly: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        cluster = machines(int(line["nodes"]))
        limit = most + cluster.device.own
        space = searched(cluster.ranks, line["params_B"])
        chosen, published = cell(line, space=space, cluster=cluster, limit=limit, effort=effort)
        fits = published.figures.memory <= limit
        same = chosen.plan == published.plan
        quicker = 1 - chosen.figures.seconds / published.figures.seconds
        slower = published.figures.seconds / chosen.figures.seconds - 1
        good[line["params_B"]].append(abs(quicker) <= WITHIN)
        strictly[line["params_B"]].append(same or (fits and slower <= WITHIN))
        model = MODELS[line["params_B"]]
        measured = model.counted(published.plan) / (int(line["gpus"]) * PEAK * float(line["mfu_pct"]) / 100)
        true = [one.figures.seconds * model.counted(one.plan) / model.counted_most for one in (published, chosen)]
        verdict = "the same" if same else f"{-100 * quicker:+.2f} %{'' if fits else ', which does not fit'}"
        cells = (
            f"{line['params_B']} B",
            line["gpus"],
            f"`{_short(published)}`",
            f"{measured:.3f} s",
            f"{true[0]:.3f} s",
            line["memory_GB"],
            f"{(published.figures.memory - cluster.device.own) / 2**30:.2f}",
            f"`{_short(chosen)}`",
            f"{true[1]:.3f} s",
            verdict,
        )
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    fitted = f"{sum(good[FITTED])} of the {len(good[FITTED])} of the smallest model, which count as fitted"
    verdict = (
        f"The choice is the published winner, or predicted within 3 % of it, in {_share(good)}, and in {fitted}. That "
        "the winner is predicted to fit, too, and to be slower by no more than 3 % of the choice's time, is so in "
        f"{_share(strictly)}."
    )
    return [*rows, "", verdict]


def _share(found: dict[str, list[bool]]) -> str:
    """Of the cells of the models that nothing was fitted on."""
    others = [one for model, cells in found.items() if model != FITTED for one in cells]
    return f"{sum(others)} of {len(others)} cells ({100 * sum(others) / len(others):.0f} %)"


def _short(candidate: Candidate) -> str:
    """A plan without what all of the table have."""
    return " ".join(word for word in str(candidate.plan).split() if not word.startswith(("precision", "wire")))


def speed(name: str, *, workers: int) -> str:
    """Search everything for a model on 512 GPUs; a row of the table of how long that takes."""
    cluster = parse_cluster("64x8 h100")
    began, before = time.monotonic(), os.times()
    effort = SearchEffort(workers=workers)
    within = PlanSpace(Plan(dp=None, precision="bf16"), ranks=512, node=8, batch=SEQUENCES, pieces=512)
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
    parser.add_argument("--rehearsals", type=int, default=16)
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
        checked()
    elif arguments.numbers:
        effort = SearchEffort(top=1, rehearsals=arguments.rehearsals, workers=arguments.workers)
        rows = table(arguments.numbers, effort=effort)
        print(rows[-1])
        if arguments.docs:
            write_between_markers(arguments.docs, text="\n".join([*rows, ""]), table="published and chosen")


if __name__ == "__main__":
    main()
