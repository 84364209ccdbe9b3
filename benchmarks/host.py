"""What a step costs besides its arithmetic: a model of many small operations, beside plain torch and its parallelism.

    python benchmarks/host.py
    python benchmarks/host.py --only dropout --turns 20
    python benchmarks/host.py --docs docs/benchmarks.md

The model has 24 blocks of width 64 and 2 x 16 tokens a rank, so nearly all time goes into starting operations. Every
loop computes the norm of the gradient, tests it for being finite and reads the loss, as meshwise does; the loop of
DTensor reads the loss alone. All contestants of a row are resident together and take turns of
a few steps. One more step of each is counted: Python calls, and torch operations of forward, backward and update."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gpt
import pipeline_contestants
import tensor_contestants
from contestants import Builder, Contestant, Step
from peer_table import machine, write_between_markers
from team import ContestantFailed, Team, Turn

SHAPE = gpt.Shape(layers=24, width=64, heads=4, sequence=16, vocabulary=256, batch=2)
DROPOUT = 0.1
_WARMUP = 4


class DroppingBlock(gpt.Block):
    """The block with dropout in the attention and after both halves."""

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, width] -> [B, T, width]."""
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = DROPOUT if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop_attention(self.project(y.transpose(1, 2).flatten(2)))  # type: ignore[operator]
        out: Tensor = x + self.drop_mlp(self.down(functional.gelu(self.up(self.norm_mlp(x)))))  # type: ignore[operator]
        return out


def model_of(shape: gpt.Shape, *, dropout: bool = False) -> gpt.GPT:
    """The model of `gpt.py`, with dropout in its blocks if asked."""
    model = gpt.build(shape)
    for block in model.blocks if dropout else ():
        block.__class__ = DroppingBlock
        block.drop_attention, block.drop_mlp = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
    return model


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def checked_loop(model: nn.Module, shape: gpt.Shape, rank: int, size: int) -> Step:
    """A step of plain torch that computes the norm of the gradient, tests it for being finite and reads the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), **gpt.ADAMW)

    def step(number: int) -> float:
        tokens, targets = gpt.rank_batch(shape, step=number, rank=rank, size=size)
        loss = gpt.mean_loss(model(tokens), targets)
        loss.backward()
        total, norm = torch.stack([loss.detach(), _norm(model.parameters())]).tolist()
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def _plain(*, dropout: bool = False) -> Builder:
    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        return checked_loop(model_of(shape, dropout=dropout), shape, 0, 1)

    return build


def _selective(shape: gpt.Shape, rank: int, size: int) -> Step:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}

    def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = model_of(shape)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return checked_loop(model, shape, 0, 1)


def _data_parallel(shape: gpt.Shape, rank: int, size: int) -> Step:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(shape), gradient_as_bucket_view=True, static_graph=True)
    return checked_loop(model, shape, rank, size)


def _fsdp2(shape: gpt.Shape, rank: int, size: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model, mesh = model_of(shape), init_device_mesh("cpu", (size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return checked_loop(model, shape, rank, size)


def meshwise_loop(plan: str, *, dropout: bool = False) -> Builder:
    """A step of meshwise under a plan, on the model of `model_of`."""

    def build(shape: gpt.Shape, rank: int, size: int) -> Step:
        import meshwise as mw

        def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            targets = batch[1]
            total = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum")
            return total, targets.numel()

        options = mw.Options(parameter_options=lambda _name, _parameter: {})  # one group decays everything
        model = model_of(shape, dropout=dropout)
        trainer = mw.parallelize(model, plan, loss=loss, world=mw.connect(), options=options, **gpt.ADAMW)
        return lambda number: trainer.step(gpt.global_batch(shape, step=number)).loss

    return build


def _one(name: str, build: Builder, *, package: str = "torch") -> Contestant:
    return Contestant(name, -1, package, name, build, module=__name__ if __name__ != "__main__" else "host")


def _ours(plan: str, *, dropout: bool = False) -> Contestant:
    return _one(f"`{plan}`{', dropout' if dropout else ''}", meshwise_loop(plan, dropout=dropout), package="meshwise")


@dataclass(frozen=True)
class Row:
    """A peer and plans that do the same work, on so many ranks; `bars`: how much of the peer's time each may take.
    `rows`: sequences of the global batch."""

    title: str
    peer: Contestant
    ours: tuple[Contestant, ...]
    bars: tuple[float, ...]
    ranks: int = 1
    rows: int = SHAPE.batch


ROWS = (
    Row("one process", _one("plain torch", _plain()), (_ours("dp=1"),), (1.05,)),
    Row(
        "dropout",
        _one("plain torch, dropout", _plain(dropout=True)),
        (_ours("dp=1", dropout=True), _ours("dp=1 random=local", dropout=True)),
        (1.25, 1.05),
    ),
    Row(
        "selective recomputation",
        _one("torch's selective checkpoint", _selective),
        (_ours("dp=1 recompute=selective"),),
        (1.0,),
    ),
    Row(
        "data",
        _one("DDP, tuned", _data_parallel),
        (_ours("dp=2"), _ours("dp=2 zero=1"), _ours("dp=2 bucket=0"), _ours("dp=2 bucket=25M")),
        (1.0, 1.0, 1.0, 1.0),
        2,
        4,
    ),
    Row(
        "sharded",
        _one("FSDP2", _fsdp2),
        (_ours("dp=2 zero=3"), _ours("dp=2 zero=3 bucket=0"), _ours("dp=2 zero=3 bucket=25M")),
        (0.35, 0.35, 0.35),
        2,
        4,
    ),
    Row(
        "tensor",
        tensor_contestants.contestant("torch DTensor"),
        (tensor_contestants.contestant("meshwise 1d"),),
        (0.8,),
        2,
    ),
    Row(
        "pipeline",
        pipeline_contestants.CHECKED,
        (pipeline_contestants.contestant("meshwise 1f1b"), *pipeline_contestants.BUCKETS),
        (0.9, 0.9, 0.9),
        2,
        2 * pipeline_contestants.MICROBATCHES,
    ),
)


def contestant(name: str) -> Contestant:
    """The contestant of that name, which its process asks for. Raises StopIteration when there is none."""
    return next(each for row in ROWS for each in (row.peer, *row.ours) if each.name == name)


@dataclass(frozen=True)
class Measured:
    """A contestant's turns, and the Python calls and torch operations of one step of rank 0."""

    contestant: Contestant
    turns: Sequence[Turn]
    calls: int
    operations: int

    def cells(self, peer: Measured, bar: float | None) -> list[str]:
        """Its part of the table; `bar`: of the peer's time, None for the peer itself."""
        milliseconds = [turn.seconds * 1e3 for turn in self.turns]
        pairs = list(zip(self.turns, peer.turns, strict=True))
        ratios = [own.seconds / other.seconds for own, other in pairs]
        best = min(milliseconds) / min(turn.seconds * 1e3 for turn in peer.turns)
        processor = statistics.median(turn.processor_seconds for turn in self.turns) * 1e3
        shares = [own.processor_seconds / other.processor_seconds for own, other in pairs]
        found = (statistics.median(ratios), statistics.median(shares))
        held = (
            ["", "", "", ""] if bar is None else [f"{found[0]:.2f}", f"**{best:.2f}**", f"{found[1]:.2f}", f"{bar:.2f}"]
        )
        times = [f"{statistics.median(milliseconds):.1f}", f"{min(milliseconds):.1f}", f"{processor:.1f}"]
        return [self.contestant.name, *times, str(self.calls), str(self.operations), *held]


def measure(row: Row, *, turns: int, steps: int) -> list[Measured]:
    """Let the contestants of a row take turns. Raises ContestantFailed."""
    shape = gpt.Shape(**{**vars(SHAPE), "batch": row.rows})
    every = (row.peer, *row.ours)
    with contextlib.ExitStack() as stack:
        teams = [stack.enter_context(Team(each, python=sys.executable, shape=shape, ranks=row.ranks)) for each in every]
        for team in teams:
            team.wait_until_ready()
            team.turn(steps=_WARMUP)
        taken: dict[Team, list[Turn]] = {team: [] for team in teams}
        for number in range(turns):
            for team in teams[:: 1 if number % 2 else -1]:
                taken[team].append(team.turn(steps=steps))
        counts = [team.counts() for team in teams]
    return [Measured(team.contestant, taken[team], *count) for team, count in zip(teams, counts, strict=True)]


def main(words: Sequence[str] | None = None) -> int:
    """Measure the rows, print each as soon as it is known, and write the page; 0 when all were measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=16, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose title has it")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `host` of this file")
    flags = parser.parse_args(words)
    head = ["split", "contestant", "median ms", "best ms", "processor ms", "Python calls", "torch operations"]
    lines = [
        f"| {' | '.join([*head, 'median ratio', 'best ratio', 'processor ratio', 'bar'])} |",
        "|---" * 11 + "|",
    ]
    print("\n".join(lines), flush=True)
    failures = 0
    for row in ROWS:
        if flags.only and not any(text in row.title for text in flags.only):
            continue
        try:
            peer, *ours = measure(row, turns=flags.turns, steps=flags.steps)
        except ContestantFailed as error:
            failures += 1
            print(error, file=sys.stderr, flush=True)
            continue
        for each, bar in zip([peer, *ours], [None, *row.bars], strict=True):
            lines.append(f"| {' | '.join([row.title, *each.cells(peer, bar)])} |")
            print(lines[-1], flush=True)
    text = "\n".join(
        [
            *lines,
            "",
            f"- Machine: {machine()}, torch {torch.__version__}; processes of one thread.",
            f"- Model: {SHAPE}; fp32, fused AdamW. The batch is 4 under `data` and `sharded`, 16 under `pipeline`.",
            f"- {flags.turns} turns of {flags.steps} steps. Ratios are to the first contestant of the row.",
            "- Median and processor ratio: over the turns. Best ratio: best turn over best turn.",
            "- Processor time: of all ranks. Python calls and torch operations: of one step on rank 0.",
        ]
    )
    if flags.docs:
        write_between_markers(flags.docs, text=text + "\n", table="host")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
