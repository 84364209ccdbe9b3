"""`meshwise bench disk`: what a disk gives to tensors that rest there, beside what it gives to dd."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from meshwise.bench.byte_sizes import parse_size
from meshwise.bench.disk import KINDS, TIER, Disk, measure
from meshwise.cli.output_files import check_outputs, write_output
from meshwise.memory.swap_file import TierError
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole


@dataclass(frozen=True)
class DiskBench:
    """Read and write a folder's disk as `offload=…:disk` does, in turns with dd."""

    folder: Path | None = None
    """A folder on the disk; `swap.folder` of a job is meant to be on the same. By default that of temporary files."""

    size: str = "1G"
    """Bytes to read, and to write; four times as much has to be free."""

    rounds: int = 5
    """Times that everything takes its turn."""

    json: Path | None = None
    """Write the rates here, in bytes per second, round by round."""


def main(words: Sequence[str]) -> int:
    """Measure and print. Raises JobError for what cannot be measured."""
    flags = parse_flags(words, prog="meshwise bench disk", default=DiskBench())
    if flags.rounds < 1:
        raise JobError(f"rounds = {flags.rounds} has to be at least 1")
    check_outputs([flags.json])
    folder = flags.folder or Path(tempfile.gettempdir())
    try:
        disk = measure(folder, size=parse_size(flags.size), rounds=flags.rounds)
    except (TierError, ValueError) as error:
        raise JobError(str(error)) from error
    console = OutputConsole()
    console.show(table(disk, folder=folder))
    if flags.json is not None:
        told = [{"who": rate.who, "kind": rate.kind, "bytes_per_second": rate.rounds} for rate in disk.rates]
        text = json.dumps({"direct": disk.direct, "rates": told}, indent=1) + "\n"
        write_output(flags.json, write=lambda path: path.write_text(text, encoding="utf-8"))
        console.print(f"wrote {flags.json}", highlight=False, markup=False, soft_wrap=True)
    return 0


def table(disk: Disk, *, folder: Path) -> Table:
    """Medians in GB/s, 10^9 bytes, and the share of the tier."""
    way = "past the page cache" if disk.direct else "through the page cache: this file system has no direct access"
    made = Table(caption=f"GB/s, medians, in {folder}, {way}", caption_justify="left")
    made.add_column("")
    for kind in KINDS:
        made.add_column(kind if kind != "both" else "both at once", justify="right")
    for who in dict.fromkeys(rate.who for rate in disk.rates):
        made.add_row(who, *(f"{disk.of(who, kind=kind).median / 1e9:.2f}" for kind in KINDS))
    made.add_section()
    made.add_row(f"{TIER} / best of dd", *(f"{disk.share(kind):.2f}" for kind in KINDS))
    return made
