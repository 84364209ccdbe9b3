"""What the tiers cost: steps beside the same plan without them, and the disk beside what dd gets from it.

    python benchmarks/tiers.py --folder /path/on/the/disk --docs docs/benchmarks.md

Steps of one GPT on one rank, plan by plan in turns of one step each, in one process; the ratio is the median over the
turns, of wall time and of processor time. The disk: the update of a model whose optimizer state rests
there, and in turns with it some of dd that read and as many that write, past the page cache as well; what counts is how
many of dd get most. The rate is bytes moved over the time from the first read of an update to its last write,
computation included. `benchmarks/disk.py` measures the disk alone."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from disk import DDS, dds
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.memory.swap_file import SwapConfig, SwapFile
from meshwise.reference import GPT, GPTConfig, next_token_loss
from peer_table import machine, write_between_markers

PLANS = (
    "zero=3",
    "zero=3 offload=optimizer:cpu",
    "zero=3 offload=optimizer:disk",
    "zero=3 offload=params:disk,optimizer:disk",
)
GPT_SHAPE = GPTConfig(layers=6, width=384, heads=6, vocabulary=8192, context=256)
WIDTH, DEPTH = 4096, 6
DD = 2**30
OURS = "the update, optimizer state on disk"


@dataclass
class Found:
    """Seconds of the steps of each plan, wall and processor time, and bytes a second of the disk, turn by turn."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    disk: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], **{f"dd × {n}": [] for n in DDS}})
    direct: bool = True


def main() -> None:
    """Measure, print, and write into the page that `--docs` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--docs", type=Path, help="write the table between the markers `tiers` of this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = Found()
    for measure in (_steps, _disk):
        run_threads(1, measure, args=(found, arguments.folder, arguments.rounds), timeout=None)
    text = markdown(found, threads=arguments.threads)
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="tiers")


def markdown(found: Found, *, threads: int) -> str:
    """The tables."""
    lines = ["| plan, one rank | step, s | ratio (quartiles) | of processor time |", "|---|---|---|---|"]
    for plan, seconds in found.wall.items():
        wall = _quartiles(seconds, found.wall[PLANS[0]])
        processor = _quartiles(found.processor[plan], found.processor[PLANS[0]])[1]
        spread = "" if plan == PLANS[0] else f" ({wall[0]:.3f}-{wall[2]:.3f})"
        lines.append(f"| `{plan}` | {statistics.median(seconds):.3f} | {wall[1]:.3f}{spread} | {processor:.3f} |")
    way = "past the page cache" if found.direct else "through the page cache: this file system has no direct access"
    shape = f"{GPT_SHAPE.layers} layers, width {GPT_SHAPE.width}, context 256, vocabulary 8192, batch 8"
    lines += [
        "",
        "| read and written at once | GB/s | ratio of the update to it (quartiles) |",
        "|---|---|---|",
        *(
            f"| {who} | {statistics.median(rates) / 1e9:.2f} | {middle:.2f} ({low:.2f}-{high:.2f}) |"
            for who, rates in found.disk.items()
            for low, middle, high in [_quartiles(found.disk[OURS], rates)]
        ),
        "",
        f"- Machine: {machine()}; {threads} threads; {way}.",
        f"- Steps: GPT of {shape}, AdamW, clipped; {len(found.wall[PLANS[0]])} turns.",
        f"- Disk: {WIDTH * WIDTH * DEPTH / 1e6:.0f} million parameters, AdamW, {len(found.disk[OURS])} updates.",
        "- dd × n: n of dd that read, beside n that write, 16 MiB at a time.",
    ]
    return "\n".join(lines) + "\n"


def _quartiles(ours: list[float], theirs: list[float]) -> list[float]:
    return statistics.quantiles([one / other for one, other in zip(ours, theirs, strict=True)], n=4)


def _steps(world: World, found: Found, folder: Path, rounds: int) -> None:
    tokens = torch.randint(0, 8192, (8, 257))
    batch = (tokens[:, :-1], tokens[:, 1:])
    trainers = {plan: _under(world, plan, folder) for plan in PLANS}
    for turn in range(-2, rounds):
        for plan in PLANS if turn % 2 else PLANS[::-1]:
            started, used = time.perf_counter(), time.process_time()
            trainers[plan].step(batch)
            if turn >= 0:
                found.wall.setdefault(plan, []).append(time.perf_counter() - started)
                found.processor.setdefault(plan, []).append(time.process_time() - used)
    for trainer in trainers.values():
        trainer.close()


def _disk(world: World, found: Found, folder: Path, rounds: int) -> None:
    options = Options(swap=SwapConfig(folder=folder))
    trainer = parallelize(Layers, "offload=optimizer:disk", loss=squares, world=world, options=options, lr=1e-3)
    file = trainer.tiers.file
    assert isinstance(file, SwapFile)
    found.direct = file.direct
    batch = torch.randn(2, WIDTH)
    trainer.step(batch)  # makes the state, and writes it for the first time
    with dds(folder, size=DD, direct=file.direct) as contestants:
        for _ in range(rounds):
            began = time.monotonic()
            trainer.step(batch)
            moved = [piece for piece in trainer.tiers.moved if piece.started >= began]
            seconds = max(piece.ended for piece in moved) - min(piece.started for piece in moved)
            total = sum(piece.bytes for piece in moved if piece.kind in ("read", "write"))
            found.disk[OURS].append(total / seconds)
            for who, move in contestants.items():
                began = time.perf_counter()
                move("both")
                found.disk[who].append(2 * DD / (time.perf_counter() - began))
    trainer.close()


class Layers(nn.Module):
    """Some hundred million parameters that are quick to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        """(..., WIDTH) to the same."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """A loss."""
    return output.square().sum(), len(batch)


def _under(world: World, plan: str, folder: Path) -> Trainer:
    options = Options(clip_norm=1.0, swap=SwapConfig(folder=folder))
    return parallelize(lambda: GPT(GPT_SHAPE), plan, loss=next_token_loss, world=world, options=options, lr=1e-3)


if __name__ == "__main__":
    main()
