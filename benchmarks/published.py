"""Predictions beside published measurements: what was measured on clusters of A100, and what the rehearsal says.

    python benchmarks/published.py --numbers FOLDER [--tables ptdp multi] [--every 10] [--docs docs/simulation.md]

Most published runs were made with Megatron-LM: fp16 with fp32 masters, attention as products and a softmax, gradients
reduced at the end of the step. So the model here is written that way, and its rehearsal is priced on `a100-80` without
overlap. Those of other code are in `later_runs.py`, on clusters as they are shipped. What was fitted, and on which
rows, `FITTED` says; errors are told of all others, beside those of calculon (untuned) on the same rows. Memory is that
of the fullest rank, where it is published."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import later_runs
from later_runs import Run
from megatron_lm import PRECISION, Megatron, cross_entropy
from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.pipeline.schedules.schedule_table import COMPUTE
from meshwise.simulate.cluster import Cluster, load, rate_at
from meshwise.simulate.cost_model import SEND_RECV, CostModel, entry_times
from meshwise.simulate.predicted_memory import fullest
from meshwise.simulate.rehearsal import Rehearsal, RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from peer_table import write_between_markers
from whole_backwards import whole_backwards

FITTED = {"single": 10, "schedules": 4}
"""Of these tables every so-manieth row was used to fit the cluster's constants or `ACTION` (1F1B); of no other any."""

ACTION = {"schedules": 0.9e-3}
"""Seconds of the host for an action where code was not that of the other tables, but of 2023."""

ADAPTERS = {"sharded": 1, "multi": 4}
"""Of a node, where they are not eight as on Selene: vTrain's configurations say 800 Gb/s, which is four of 200 Gb/s.
DeepSpeed's runs on Selene took as long as if they used one, which was read off these rows."""

TITLES = {
    "ptdp": "PTD-P, weak scaling (table 1)",
    "parallel": "PTD-P, strong scaling (table 2)",
    "sharded": "ZeRO-3 of DeepSpeed (table 2), through one adapter of eight",
    "single": "vTrain, 2 to 8 GPUs of one node",
    "multi": "vTrain, 64 to 512 GPUs",
    "schedules": "pipeline schedules (zero bubble, table 4)",
    "layer": "a layer, recomputed and in sequence parallel (table 4)",
    "steps": "22 B to 1 T, recomputed and in sequence parallel (table 5)",
    "megascale": "MegaScale's runs of Megatron-LM, 256 to 12,288 GPUs (table 2)",
    "foundry-a100": "llm-foundry, FSDP, 8 to 64 A100",
    "torchtitan": "torchtitan, FSDP2, 64 A100",
    "foundry-h100": "llm-foundry, FSDP, 8 to 512 H100",
    "nemo": "NeMo with Megatron-Core, 16 to 2,048 H100",
}
CALCULON = {"ptdp": "ptdp_table1", "single": "vtrain_single", "multi": "vtrain_multi"}
"""The tables as the peer's file calls them."""

SCHEDULES = {
    "1F1B": "schedule=1f1b",
    "1F1B-I": "schedule=interleaved",
    "ZB-1p": "schedule=zb-h1",
    "ZB-2p": "schedule=zb-h2",
}
"""Those of the zero-bubble paper; of its two that are found by search, the ones that it compares them to."""

EXPERIMENTS = {
    "baseline no recompute": "recompute=none",
    "sequence parallelism": "recompute=none sequence_parallel=1",
    "baseline with full recompute": "recompute=full",
    "selective recompute": "recompute=selective",
    "selective + sequence": "recompute=selective sequence_parallel=1",
    "full recompute": "recompute=full",
    "present work": "recompute=selective sequence_parallel=1",
}
"""Of the tables of a layer and of steps with it, as plans."""

LAYERS = 4, 8
"""Of the two models whose difference a layer is."""


@dataclass(frozen=True)
class Row:
    """A published run."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    micro_batch: int
    tp: int
    dp: int
    pp: int
    virtual: int
    vocabulary: int
    seconds: float
    words: str = "recompute=full"
    """Of its plan, beside its numbers."""

    ends: int = 0
    """Layers that the first and the last stage have less than the others: the embedding and the head count as them."""

    memory: float = 0.0
    """Bytes of the fullest rank; 0 where they are not published."""

    @property
    def name(self) -> str:
        """Beside the plan."""
        return f"{self.layers}x{self.hidden}"

    @property
    def plan(self) -> str:
        """As a plan of ours."""
        microbatches = self.batch // (self.dp * self.micro_batch)
        return (
            f"tp={self.tp} dp={self.dp} pp={self.pp} microbatches={microbatches} virtual_stages={self.virtual} "
            f"partition=params random=local {self.words}"
        )

    @property
    def starts(self) -> tuple[str, ...]:
        """The modules that stages begin with, but for the first."""
        parts, count = self.pp * self.virtual, self.layers + 2 * self.ends
        firsts = [stage * count // parts - self.ends for stage in range(1, parts)]
        return tuple(f"blocks.{first}" if first < self.layers else "norm" for first in firsts)

    @property
    def ranks(self) -> int:
        """How many GPUs."""
        return self.tp * self.dp * self.pp


def rehearsed(row: Row) -> Rehearsal:
    """The run, rehearsed: every stage has as many layers."""
    tokens = torch.empty(row.batch, row.sequence, dtype=torch.long, device="meta")
    options = Options(cut=CutOptions(at=row.starts), example=(tokens, tokens), precision=PRECISION)
    sizes = {"layers": row.layers, "width": row.hidden, "heads": row.heads, "sequence": row.sequence}
    build = partial(Megatron, **sizes, vocabulary=row.vocabulary)
    subject = RehearsalSubject(build, cross_entropy, (tokens, tokens), options=options)
    with whole_backwards(row.plan) as plan:
        return rehearse(subject, plan=plan, ranks=row.ranks, device="cuda")


def ptdp(numbers: Path) -> Iterator[Row]:
    """Weak scaling of Narayanan et al., 2021, table 1: one sequence a micro-batch, the fewest virtual stages."""
    for line in _lines(numbers / "megatron_ptdp_table1.csv"):
        layers, pp = int(line["layers"]), int(line["pp"])
        virtual = _fewest(layers, pp)
        yield Row(
            layers, int(line["hidden"]), int(line["heads"]), int(line["seq"]), int(line["global_batch"]), 1,
            int(line["tp"]), int(line["dp_derived"]), pp, virtual, int(line["vocab"]),
            float(line["iter_time_s_derived_from_eq3"]), _interleaved(virtual),
        )  # fmt: skip


def parallel(numbers: Path) -> Iterator[Row]:
    """Strong scaling of the same paper's table 2: its own runs."""
    for row in _strong(numbers, "PTD-P"):
        virtual = _fewest(row.layers, row.pp)
        yield dataclasses.replace(row, virtual=virtual, words=_interleaved(virtual))


def sharded(numbers: Path) -> Iterator[Row]:
    """The runs of DeepSpeed's ZeRO-3 beside them."""
    for row in _strong(numbers, "ZeRO-3"):
        yield dataclasses.replace(row, words=f"{row.words} zero=3")


def _strong(numbers: Path, scheme: str) -> Iterator[Row]:
    """The table tells flops per second; those of a step are the paper's equation 3."""
    shapes = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
    sequence, vocabulary = 2048, 51200
    for line in _lines(numbers / "megatron_ptdp_table2_zero3.csv"):
        if line["scheme"] == scheme:
            layers, hidden, heads = shapes[line["params_B"]]
            gpus, tp, pp, batch = (int(line[key]) for key in ("gpus", "tp", "pp", "global_batch"))
            attended = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
            flops = 96 * batch * sequence * layers * hidden**2 * attended
            yield Row(
                layers, hidden, heads, sequence, batch, int(line["micro_batch"]), tp, gpus // (tp * pp), pp, 1,
                vocabulary, flops / (gpus * float(line["tflops_per_gpu"]) * 1e12),
            )  # fmt: skip


def schedules(numbers: Path) -> Iterator[Row]:
    """Pipeline schedules of Qi et al., 2023 (zero bubble), table 4: one stage to a GPU, nothing recomputed."""
    for line in _lines(numbers / "zero_bubble_table4_5.csv"):
        if not line["samples_per_gpu_per_s"]:
            continue
        layers, pp, micro_batch = (int(line[key]) for key in ("layers", "pipeline_gpus", "micro_batch"))
        batch = int(line["n_microbatches"]) * micro_batch
        virtual = (layers + 2) // pp if line["schedule"] == "1F1B-I" else 1
        yield Row(
            layers, int(line["hidden"]), int(line["heads"]), int(line["seq"]), batch, micro_batch, 1, 1, pp, virtual,
            51200, batch / (pp * float(line["samples_per_gpu_per_s"])), SCHEDULES[line["schedule"]], 1,
            1e9 * float(line["peak_memory_GB"]),
        )  # fmt: skip


def _fewest(layers: int, pp: int) -> int:
    """Virtual stages."""
    each = layers // pp
    return next((virtual for virtual in range(2, each + 1) if each % virtual == 0), 1) if pp > 1 else 1


def _interleaved(virtual: int) -> str:
    return "recompute=full schedule=interleaved" if virtual > 1 else "recompute=full"


def layer(numbers: Path) -> Iterator[Row]:
    """One layer of 22 billion parameters of Korthikanti et al., 2022, table 4: four sequences on eight GPUs."""
    for line in _lines(numbers / "seqsel_table4_layer22B.csv"):
        words = EXPERIMENTS[line["experiment"]]
        yield Row(1, 6144, 64, 2048, 4, 4, 8, 1, 1, 1, 51200, float(line["combined_ms"]) / 1e3, words)


def steps(_numbers: Path) -> Iterator[Row]:
    """Whole steps of the same paper's table 5, which lie beside this file."""
    for line in _lines(Path(__file__).with_name("seqsel_steps.csv")):
        layers, hidden, heads, batch, micro_batch, tp, dp, pp, virtual = (
            int(line[key])
            for key in ("layers", "hidden", "heads", "global_batch", "micro_batch", "tp", "dp", "pp", "virtual_stages")
        )
        words = EXPERIMENTS[line["technique"]] + (" schedule=interleaved" if virtual > 1 else "")
        seconds = float(line["iter_time_s"])
        yield Row(layers, hidden, heads, 2048, batch, micro_batch, tp, dp, pp, virtual, 51200, seconds, words)


def megascale(_numbers: Path) -> Iterator[Row]:
    """Megatron-LM beside MegaScale: Jiang et al., 2024, tables 1 and 2. 175 B with as many heads as they had."""
    words = f"{EXPERIMENTS['present work']} schedule=interleaved"
    for run in later_runs.runs("megascale", cluster="a100-80"):
        yield Row(
            96, 12288, 128, run.sequence, run.global_batch, run.micro_batch, run.tp, run.dp, run.pp,
            run.virtual_stages, 64000, run.seconds, words,
        )  # fmt: skip


def single(numbers: Path) -> Iterator[Row]:
    """VTrain's runs on one node of 8 A100."""
    yield from _vtrain(numbers / "vtrain_ground_truth_single.csv")


def multi(numbers: Path) -> Iterator[Row]:
    """VTrain's runs on 64 to 512 A100."""
    yield from _vtrain(numbers / "vtrain_ground_truth_multi.csv")


def _vtrain(path: Path) -> Iterator[Row]:
    for line in _lines(path):
        get: Callable[[str], int] = lambda key, line=line: int(line[key])  # type: ignore[misc] # noqa: E731
        yield Row(
            get("layers"), get("hidden"), get("heads"), get("seq"), get("global_batch"), get("micro_batch"),
            get("tp"), get("dp"), get("pp"), 1, 51200, float(line["iter_time_ms"]) / 1e3,
        )  # fmt: skip


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _later(source: str, cluster: str) -> Callable[[Path], Iterator[Run]]:
    return lambda _numbers: later_runs.runs(source, cluster=cluster)


TABLES: Mapping[str, Callable[[Path], Iterator[Row | Run]]] = {
    "ptdp": ptdp,
    "parallel": parallel,
    "sharded": sharded,
    "single": single,
    "multi": multi,
    "schedules": schedules,
    "layer": layer,
    "steps": steps,
    "megascale": megascale,
    "foundry-a100": _later("llm-foundry", "a100-80"),
    "torchtitan": _later("torchtitan", "a100-80"),
    "foundry-h100": _later("llm-foundry", "h100"),
    "nemo": _later("dgxc", "h100"),
}


def main() -> None:
    """Predict the rows that were not fitted, and tell the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=Path, required=True)
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--every", type=int, default=1, help="of the largest table, one row in so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    lines = [
        "| runs | rows, none of them fitted | mean absolute error | median | calculon | memory |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for table in arguments.tables:
            rows = list(TABLES[table](arguments.numbers))
            fitted, every = FITTED.get(table, 0), arguments.every if table == "single" else 1
            tried = [i for i in range(len(rows)) if i % every == every // 2 and not (fitted and i % fitted == 0)]
            errors, wrong = [], []
            for index, (seconds, size) in zip(
                tried, pool.map(told, [table] * len(tried), map(rows.__getitem__, tried)), strict=True
            ):
                row = rows[index]
                errors.append(abs(seconds / row.seconds - 1))
                off = f"{100 * (seconds / row.seconds - 1):+.1f} %"
                print(f"{row.plan}  {row.name}  {seconds:.3f}  {row.seconds:.3f}  {off}", flush=True)
                if row.memory:
                    wrong.append(abs(size / row.memory - 1))
                    print(f"    {size / 1e9:.1f} GB  {row.memory / 1e9:.0f} GB", flush=True)
            peer = calculon(arguments.numbers, table, [rows[index].seconds for index in tried])
            lines.append(
                f"| {TITLES[table]} | {len(tried)} of {len(rows)} | {_percent(errors)} "
                f"| {100 * statistics.median(errors):.1f} % | {_percent(peer)} | {_percent(wrong)} |"
            )
    print("\n".join(lines))
    if arguments.docs:
        write_between_markers(arguments.docs, text="\n".join([*lines, ""]), table="published")


def told(table: str, row: Row | Run) -> tuple[float, int]:
    """The seconds that a run is predicted to take, and the bytes of its fullest rank.

    Megatron-LM has tokens in the first dim, so what sequence parallelism gathers lies there without copies."""
    if isinstance(row, Run):
        return later_runs.predicted(row).seconds, 0
    base = load("a100-80")
    nodes = -(-row.ranks // base.ranks_per_node)
    rates = dict.fromkeys(("cat", "copy_"), math.inf) if "sequence_parallel" in row.words else base.device.rates
    device = dataclasses.replace(base.device, action=ACTION.get(table, base.device.action), rates=rates)
    cluster = dataclasses.replace(base, device=device, overlap=False, nodes=nodes, adapters=ADAPTERS.get(table, 8))
    if table == "layer":
        return a_layer(row, cluster), 0
    prediction = predict(rehearsed(row), cluster=scattered(cluster, row))
    return prediction.seconds, fullest(prediction.memory).peak.bytes if row.memory else 0


def a_layer(row: Row, cluster: Cluster) -> float:
    """The seconds of one layer more, forward and backward, less those of its update."""
    few, many = (sum(worked(rehearsed(dataclasses.replace(row, layers=layers)), cluster)) for layers in LAYERS)
    return (many - few) / (LAYERS[1] - LAYERS[0])


def worked(rehearsal: Rehearsal, cluster: Cluster) -> Iterator[float]:
    """The seconds of each forward and each backward, with what it waits for."""
    parts = (part for part in rehearsal.steps[0] if part.kind in COMPUTE)
    return (max(moment.stop for moment in entry_times([part], cost_model=CostModel(cluster))) for part in parts)


def scattered(cluster: Cluster, row: Row) -> Cluster:
    """With messages as Megatron-LM sends them: each rank of tp a part, which they put together on the other side."""
    size = 2 * row.micro_batch * row.sequence * row.hidden
    share = min(1.0, cluster.adapters / cluster.ranks_per_node)
    apart = size / row.tp / rate_at(cluster.between.bandwidth, size=size / row.tp) / share
    together = size * (1 - 1 / row.tp) / rate_at(cluster.inside.bandwidth, size=size)
    rates = {**cluster.between.collectives, SEND_RECV: ((size, size / (apart + together) / share),)}
    return dataclasses.replace(cluster, between=dataclasses.replace(cluster.between, collectives=rates))


def calculon(numbers: Path, table: str, measured: Sequence[float]) -> list[float]:
    """The peer's absolute errors on the rows of a table that took so long."""
    wanted = {f"{seconds:.6g}" for seconds in measured}
    unit = 1.0 if table == "ptdp" else 1e-3
    return [
        abs(float(line["calculon_pred"]) / float(line["measured"]) - 1)
        for line in _lines(numbers / "peer_calculon_on_published.csv")
        if line["set"] == CALCULON.get(table)
        and f"{float(line['measured']) * unit:.6g}" in wanted
        and line["calculon_pred"]
    ]


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * statistics.mean(errors):.1f} %" if errors else ""


if __name__ == "__main__":
    main()
