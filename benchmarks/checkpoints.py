"""Saving and loading beside torch.distributed.checkpoint, and what a save costs the training that goes on.

    python benchmarks/checkpoints.py --ranks 4 --rounds 5 --docs docs/benchmarks.md

One GPT (see gpt.py) with its AdamW state, once under `dp=N zero=3` and once under FSDP2, in the same processes. A round
saves and loads both, alternately ours first and theirs first; the figure is the median of the ratios of neighbours.
Both flush their files to the disk before a save counts as done; ours computes checksums as it writes and compares them
as it reads. What was just written is read from the system's cache.

The cost of a save is that of ten steps with a save begun before the first, divided by that of ten steps without, its
neighbours: with and without come first in turn, and the figure is the median over a dozen pairs, because a machine with
other work to do makes single ones differ by more than a save costs."""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpt
import meshwise as mw
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.engine.trainer import Trainer
from peer_table import machine, write_between_markers

STEPS = 10


@dataclass(frozen=True)
class Setting:
    """What is measured, where."""

    folder: Path
    rounds: int
    cycles: int


Seconds = dict[str, list[float]]


def measure(world: World, setting: Setting) -> tuple[Seconds, int]:
    """On every rank: the seconds of each kind of turn, and the bytes of a checkpoint."""
    distributed.init_process_group(
        "gloo",
        store=FileStore(str(setting.folder / "store"), world.size),
        rank=world.rank,
        world_size=world.size,
    )
    trainer, peer = _ours(world), _Peer(world)
    found: Seconds = {name: [] for name in ("our save", "their save", "our load", "their load")}
    found |= {name: [] for name in ("with", "without", "with, processor", "without, processor", "still")}
    ours, theirs = setting.folder / "ours", setting.folder / "theirs"
    size = 0
    for number in range(-1, setting.rounds):  # the first round warms up
        turns: list[tuple[str, Callable[[], Any]]] = [
            ("our save", lambda: trainer.save(ours)),
            ("their save", lambda: peer.save(theirs)),
            ("our load", lambda: trainer.load(ours)),
            ("their load", lambda: peer.load(theirs)),
        ]
        for first in (0, 2):
            pair = turns[first : first + 2]
            for name, turn in pair if number % 2 else reversed(pair):
                seconds = _timed(world, turn)
                if number >= 0:
                    found[name].append(seconds)
        size = sum(path.stat().st_size for path in ours.iterdir())
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
        world.barrier()
    for number in range(setting.cycles):
        for folder in (ours, None) if number % 2 else (None, ours):
            name, start = "without" if folder is None else "with", time.process_time()
            found[name].append(_timed(world, functools.partial(_cycle, trainer, folder, found["still"])))
            found[f"{name}, processor"].append(time.process_time() - start)
    distributed.destroy_process_group()
    return found, size


def _cycle(trainer: Trainer, folder: Path | None, still: list[float]) -> None:
    """Ten steps. With a save, `still` gets the seconds of the calls that begin it and that wait for it at the end."""
    start = time.perf_counter()
    saving = None if folder is None else trainer.save(folder, wait=False)
    began = time.perf_counter() - start
    for step in range(STEPS):
        trainer.step(gpt.global_batch(gpt.Shape(), step=step))
    if saving is not None:
        start = time.perf_counter()
        saving.wait()
        still.append(began + time.perf_counter() - start)


def _timed(world: World, turn: Callable[[], Any]) -> float:
    """Seconds from the start of all ranks to the end of the last."""
    world.barrier()
    start = time.perf_counter()
    turn()
    world.barrier()
    return time.perf_counter() - start


def _ours(world: World) -> Trainer:
    def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return total, batch[1].numel()

    trainer = mw.parallelize(gpt.build(gpt.Shape()), "dp=auto zero=3", loss=loss, world=world, **gpt.ADAMW)
    trainer.step(gpt.global_batch(gpt.Shape(), step=0))
    return trainer


class _Peer:
    """FSDP2 and torch.distributed.checkpoint, as their documentation puts them together."""

    def __init__(self, world: World) -> None:
        self._model = gpt.build(gpt.Shape())
        mesh = init_device_mesh("cpu", (world.size,))
        blocks = [module for name, module in self._model.named_modules() if isinstance(module, gpt.Block)]
        for module in (*blocks, self._model):
            fully_shard(module, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **gpt.ADAMW)
        tokens, targets = gpt.rank_batch(gpt.Shape(), step=0, rank=world.rank, size=world.size)
        torch.autograd.backward(gpt.mean_loss(self._model(tokens), targets))
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=folder)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def _ratios(found: Seconds, ours: str, theirs: str) -> str:
    ratios = [a / b for a, b in zip(found[ours], found[theirs], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"**{median:.3f}** ({lower:.3f}–{upper:.3f})"


def table(found: Seconds, *, size: int, arguments: argparse.Namespace) -> str:
    """The text between the markers of the page."""
    median = {name: statistics.median(seconds) for name, seconds in found.items()}
    rows = [
        f"| {what} | {median[f'our {what}']:.3f} | {median[f'their {what}']:.3f} "
        f"| {_ratios(found, f'our {what}', f'their {what}')} | {size / median[f'our {what}'] / 1e9:.2f} |"
        for what in ("save", "load")
    ]
    lines = [
        "| | ours, s | torch DCP, s | ratio (quartiles) | ours, GB/s |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"- Machine: {machine()}; {arguments.ranks} processes of one thread.",
        f"- State: {gpt.Shape()}, fp32, AdamW: {size / 1e6:.0f} MB; `dp={arguments.ranks} zero=3` beside FSDP2.",
        f"- {arguments.rounds} rounds after one that does not count. Ratio: median of ours/theirs over the rounds.",
        _cost(found, arguments.cycles),
        f"- Made by `python benchmarks/checkpoints.py {' '.join(sys.argv[1:])}`.",
    ]
    return "\n".join(lines) + "\n"


def _cost(found: Seconds, cycles: int) -> str:
    return (
        f"- {STEPS} steps with a save begun before the first, published by the end: "
        f"{statistics.median(found['with']):.2f} s; without: {statistics.median(found['without']):.2f} s; ratio "
        f"{_ratios(found, 'with', 'without')} over {cycles} pairs, of processor time of the first rank "
        f"{_ratios(found, 'with, processor', 'without, processor')}. The calls that begin the "
        f"save and wait for it at the end take {statistics.median(found['still']):.3f} s of these."
    )


def main() -> None:
    """Measure, print, and write into the page that `--docs` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=12, help="pairs of ten steps with and without a save")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--docs", type=Path, help="write the table between the markers of this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        setting = Setting(Path(folder), arguments.rounds, arguments.cycles)
        found, size = run(arguments.ranks, measure, args=(setting,))[0]
    text = table(found, size=size, arguments=arguments)
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="checkpoints")


if __name__ == "__main__":
    main()
