"""`meshwise bench calibrate`: this machine, measured as a simulation needs to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tomli_w
import torch

from meshwise.bench.byte_sizes import parse_size
from meshwise.bench.calibrate import Calibrated, CalibrationEffort, calibrate
from meshwise.cli.output_files import check_outputs, write_output
from meshwise.cli.rank_count import MOST_BY_DEFAULT, asked, chosen, launched_ranks
from meshwise.comm import World, run, torchrun_line
from meshwise.comm.api.launch_environment import is_rank, prints_for_job
from meshwise.comm.launch.cores import cores
from meshwise.simulate.cluster import to_table
from meshwise.train.counted import counted
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole

UNDISTURBED = 0.9
"""The part of their time that ranks have to have had, for a calibration to be left without a word."""


@dataclass(frozen=True)
class Calibration:
    """Measure what this machine computes, moves and sends, with all its ranks at it, and write it as a cluster."""

    output: Path = Path("cluster.toml")
    """The file to write, which `meshwise simulate --on` reads."""

    ranks: int | None = None
    """Local ranks to start; by default one per GPU, or one per core, at most 4. Under torchrun its ranks are used."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure; auto takes the GPUs when there are any."""

    comm: Literal["auto", "local", "gloo"] = "auto"
    """How ranks on CPUs of one host talk: as they will in training."""

    rounds: int = CalibrationEffort.rounds
    """Times that everything takes its turn."""

    lengths: tuple[int, ...] = CalibrationEffort.lengths
    """Of each dim of a matrix product."""

    sizes: tuple[str, ...] = ("16K", "128K", "1M", "8M", "64M")
    """Bytes that operations and collectives move."""


def main(words: Sequence[str]) -> int:
    """Calibrate. Raises JobError before any rank is started."""
    flags = parse_flags(words, prog="meshwise bench calibrate", default=Calibration())
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise JobError("--device cuda, and torch sees no GPU here; try --device cpu, or ask `meshwise doctor`")
    try:
        effort = CalibrationEffort(flags.lengths, tuple(parse_size(size) for size in flags.sizes), flags.rounds)
    except ValueError as error:
        raise JobError(str(error)) from error
    if flags.rounds < 1 or not flags.lengths or min(flags.lengths) < 1 or not flags.sizes:
        raise JobError("nothing to measure: give at least one round, one length of at least 1 and one size")
    longest = effort.longest(on_gpu=flags.device == "cuda" or (flags.device == "auto" and torch.cuda.is_available()))
    if min(flags.lengths) > longest:
        raise JobError(f"products of {min(flags.lengths)} in each dim take too long; give a length up to {longest}")
    check_outputs([flags.output])
    size, comm = _ranks(flags), chosen(flags.comm)
    if not is_rank():
        line = torchrun_line(size, ["-m", "meshwise", "bench", "calibrate", *words])
        print(f"starting {counted(size, of='local rank')}; the same with torchrun:\n  {line}", flush=True)
    device = None if flags.device == "auto" else flags.device
    found: Calibrated = run(size, _rank, args=(effort,), device=device, comm=comm)[0]
    if prints_for_job():
        text = tomli_w.dumps(to_table(found.cluster))
        write_output(flags.output, write=lambda path: path.write_text(text, encoding="utf-8"))
        told = f"wrote {flags.output}: {found.cluster.device.name}, {counted(size, of='rank')}"
        if found.share < UNDISTURBED:
            told += f"; {_disturbed(found, size=size)}"
        OutputConsole().print(told, highlight=False, soft_wrap=True)
    return 0


def _disturbed(found: Calibrated, *, size: int) -> str:
    """Why the ranks did not have all of their time."""
    most = cores()
    if found.cluster.device.kind == "cpu" and not launched_ranks() and size > most:
        shared = f"{most} core{'s' * (most > 1)}"
        return f"the ranks share {shared}, but are told as if each had one: calibrate and train with --ranks {most}"
    return f"other work had {1 - found.share:.0%} of their time: calibrate again when the machine is quieter"


def _rank(world: World, effort: CalibrationEffort) -> Calibrated:
    return calibrate(world, effort=effort)


def _ranks(flags: Calibration) -> int:
    if launched := launched_ranks():
        return launched
    gpus = torch.cuda.device_count() if flags.device != "cpu" else 0
    return asked(flags.ranks) or gpus or max(1, min(MOST_BY_DEFAULT, cores()))
