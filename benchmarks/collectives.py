"""Collectives of ranks that share memory, beside torch's own over gloo and beside a plain copy, as one table.

    python benchmarks/collectives.py                             # 2 and 4 ranks, 4 KiB to 256 MiB
    python benchmarks/collectives.py --rounds 15 --docs docs/benchmarks.md

It runs what `meshwise bench collectives --on ordinary shared joint gloo` runs and tells multiples: how many times as
fast as gloo, and how many copies of the tensor by every rank at once it takes as long as. What memory allows at best
follows from what has to be read and written, where a copy by n ranks reads n tensors and writes n:

    all-reduce       every rank's tensor is read and written         1 copy
    all-gather       each reads and writes what it did not have      (n-1)/n
    reduce-scatter   every tensor is read, one is written            (n+1)/2n"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.bench.collective_benchmark import COPY, VARIANTS, Measurement, SizeSweep, measure, parse_size
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from peer_table import machine, write_between_markers

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = ("4K", "64K", "1M", "16M", "64M", "256M")
_SMALL, _LARGE, _HUGE = 64 << 10, 16 << 20, 64 << 20

Key = tuple[str, int, int, str]


@dataclass(frozen=True)
class Cell:
    """One collective at one size. `gloo`: its time over ours; `copies`: our time over that of a copy; medians."""

    on: str
    bytes: int
    gloo: float
    copies: float

    @property
    def bar(self) -> float:
        """At least how many times as fast as gloo it is to be; 0 where nothing is asked."""
        if self.bytes <= _SMALL:
            return 5.0
        if self.bytes < _LARGE:
            return 0.0
        return 2.0 if self.on == "ordinary" else 6.0

    def __str__(self) -> str:
        """Bold where it reaches its bar, with the bar where it does not; then the copies, of shared tensors."""
        text = f"{self.gloo:.1f}"
        if self.bar:
            text = f"**{text}**" if self.gloo >= self.bar else f"{text} (bar {self.bar:g})"
        if self.on != "shared" or self.bytes < _LARGE:
            return text
        late = " (bar 2)" if self.bytes >= _HUGE and self.copies > 2 else ""
        return f"{text} [{self.copies:.1f}{late}]"


def cell(found: Mapping[Key, Measurement], *, kind: str, ranks: int, size: int, on: str) -> Cell:
    """What was measured, beside gloo and a copy."""
    ours = found[kind, ranks, size, on].median_seconds
    gloo, copied = found[kind, ranks, size, "gloo"], found[COPY, ranks, size, "ordinary"]
    return Cell(on, size, gloo.median_seconds / ours, ours / copied.median_seconds)


def table(measurements: Sequence[Measurement], *, remarks: Sequence[str]) -> str:
    """A row for each collective, number of ranks and kind of memory."""
    found = {(one.kind, one.ranks, one.bytes, one.on): one for one in measurements}
    sizes, groups = sorted({one.bytes for one in measurements}), sorted({one.ranks for one in measurements})
    kinds = [kind for kind in KINDS if kind in {one.kind for one in measurements}]
    rows = [f"| collective | ranks | tensors | {' | '.join(map(_size_text, sizes))} |", "|---" * (3 + len(sizes)) + "|"]
    for kind in kinds:
        for ranks in groups:
            for on in VARIANTS:
                if on == "gloo" or not any((kind, ranks, size, on) in found for size in sizes):
                    continue
                cells = [str(cell(found, kind=kind, ranks=ranks, size=size, on=on)) for size in sizes]
                rows.append(f"| `{kind}` | {ranks} | {on} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def _size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"


def _rank(world: World, sweep: SizeSweep) -> list[Measurement]:
    return measure(world, sweep=sweep)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4], help="how many of them take part")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes of the tensor, or of its whole side")
    parser.add_argument("--rounds", type=int, default=9, help="times that everything takes its turn")
    parser.add_argument("--docs", type=Path, help="write the table between the markers `collectives` of this file")
    arguments = parser.parse_args(words)
    sizes = tuple(map(parse_size, arguments.sizes))
    groups = tuple(arguments.groups)
    sweep = SizeSweep(KINDS, sizes, groups, rounds=arguments.rounds, on=VARIANTS)
    measurements = run(arguments.ranks, _rank, args=(sweep,), device="cpu", comm="local")[0]
    chosen = f"--ranks {arguments.ranks} --groups {' '.join(map(str, groups))} --sizes {' '.join(arguments.sizes)}"
    remarks = [
        f"Machine: {machine()}, torch {torch.__version__}; {arguments.ranks} processes of one thread.",
        "Multiples of gloo's speed, of medians. In brackets: the time in copies of the tensor by all ranks at once.",
        "What memory allows is 1 copy for all_reduce, (n-1)/n for all_gather and (n+1)/2n for reduce_scatter.",
        "Bars: 5 up to 64 KiB; from 16 MiB 2 (ordinary) and 6 (others); 2 copies from 64 MiB. Bold: reached.",
        "joint: the ranks hold the whole together, as units of ZeRO 1 to 3 are held, and each has written its part.",
        f"Made by `python benchmarks/collectives.py {chosen} --rounds {arguments.rounds}`.",
    ]
    text = table(measurements, remarks=remarks)
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="collectives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
