"""`meshwise bench`: what links could do, what the collectives do, what a rank computes, what a disk takes and gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from meshwise.bench.bandwidth import BUS_FACTORS, COPY, Measurement
from meshwise.bench.byte_sizes import parse_size
from meshwise.bench.collective_tables import as_csv, as_json, as_table
from meshwise.bench.collectives import SizeSweep, group_sizes, measure
from meshwise.bench.machine import Interface, link_text, network_interfaces
from meshwise.bench.plot import plot, require_matplotlib
from meshwise.cli import calibrate_command as calibrate
from meshwise.cli import disk_command as disk
from meshwise.cli.output_files import check_outputs, write_output
from meshwise.cli.rank_count import MOST_BY_DEFAULT, asked, chosen, launched_ranks
from meshwise.comm import World, run, torchrun_line
from meshwise.comm.api.launch_environment import is_rank, prints_for_job
from meshwise.comm.launch.cores import cores
from meshwise.train.counted import counted
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole, screen

_WIDTH = 110
"""Of the table where the output is not a terminal."""


@dataclass(frozen=True)
class Collectives:
    """Time every collective over sizes and group sizes, beside a copy in memory."""

    ranks: int | None = None
    """Local ranks to start; by default one per GPU, or one per core, at most 4. Under torchrun its ranks are used."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the tensors are; auto takes the GPUs when there are any."""

    collectives: tuple[str, ...] = tuple(kind for kind in BUS_FACTORS if kind != COPY)
    """Which collectives."""

    sizes: tuple[str, ...] = ("4K", "64K", "1M", "4M", "16M", "64M")
    """Bytes of the tensor: 4K, 64M; of its whole side where one side is larger."""

    groups: tuple[int, ...] = ()
    """Sizes of the groups; by default all that divide the number of ranks."""

    on: tuple[Literal["ordinary", "shared", "common", "gloo"], ...] = ("ordinary",)
    """What to measure on: ordinary tensors; tensors in memory that the ranks share (all_gather in place: each part lies
    in the whole); one that they hold together (all_gather); torch's own collectives over gloo on ordinary tensors, as a
    yardstick on one machine's CPUs."""

    comm: Literal["auto", "local", "gloo"] = "auto"
    """How ranks on CPUs of one host talk: through shared memory, by messages over gloo, or as they can."""

    rounds: int = 5
    """Times that everything takes its turn."""

    csv: Path | None = None
    """Write the measurements here, times in seconds and bandwidths in bytes per second."""

    json: Path | None = None
    """The same as JSON."""

    png: Path | None = None
    """Draw bus bandwidth over size; needs the extra `plot`."""


def main(words: Sequence[str]) -> int:
    """Run the benchmark that the words name. Raises JobError before any rank is started."""
    if words and words[0] in ("-h", "--help"):
        print(f"usage: meshwise bench {'|'.join(_BENCHMARKS)} [OPTIONS]; with --help, each tells its options")
        return 0
    if not words or words[0] not in _BENCHMARKS:
        given = f"no benchmark {words[0]!r}" if words and not words[0].startswith("-") else "name a benchmark"
        raise JobError(f"{given}; there are: {', '.join(f'meshwise bench {name}' for name in _BENCHMARKS)}")
    return _BENCHMARKS[words[0]](words[1:])


def _collectives(words: Sequence[str]) -> int:
    flags = parse_flags(words, prog="meshwise bench collectives", default=Collectives())
    size, comm = _ranks(flags), chosen(flags.comm)
    check_outputs((flags.csv, flags.json, flags.png))
    sweep = _sweep(flags, size)
    console = screen(width=_WIDTH)
    if not is_rank():
        line = torchrun_line(size, ["-m", "meshwise", "bench", "collectives", *words])
        console.print(
            f"starting {counted(size, of='local rank')}; the same with torchrun:\n  {line}",
            highlight=False,
            soft_wrap=True,
        )
    device = None if flags.device == "auto" else flags.device
    measurements = run(size, _rank, args=(sweep,), device=device, comm=comm)[0]
    if prints_for_job():
        if {one.kind for one in measurements} == {COPY} != set(flags.collectives):
            raise JobError("nothing was measured: these ranks hold no memory in common; measure on ordinary")
        _tell(console, flags, measurements)
    return 0


def _rank(world: World, sweep: SizeSweep) -> list[Measurement]:
    return measure(sweep, world=world)


def _ranks(flags: Collectives) -> int:
    if launched := launched_ranks():
        return launched
    gpus = torch.cuda.device_count() if flags.device != "cpu" else 0
    return asked(flags.ranks) or gpus or max(2, min(MOST_BY_DEFAULT, cores()))


def _sweep(flags: Collectives, size: int) -> SizeSweep:
    try:
        sweep = SizeSweep(
            kinds=flags.collectives,
            sizes=tuple(parse_size(text) for text in flags.sizes),
            groups=flags.groups or group_sizes(size),
            rounds=flags.rounds,
            on=flags.on,
        )
        sweep.check(world_size=size)
        if flags.png is not None:
            require_matplotlib()
    except ValueError as error:
        raise JobError(str(error)) from error
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise JobError("--device cuda, and torch sees no GPU here; try --device cpu, or ask `meshwise doctor`")
    return sweep


def _tell(console: OutputConsole, flags: Collectives, measurements: Sequence[Measurement]) -> None:
    links = [link_text(interface) for interface in network_interfaces() if _is_link(interface)]
    caption = (
        "Time of the slowest rank. Bus bandwidth as nccl-tests defines it. Copy: all ranks of the group copy as much "
        "in their own memory, at the same time."
    )
    if links:
        caption += f" Links of this machine to others: {', '.join(links)}."
    console.show(as_table(measurements, caption=caption))
    for path, text in ((flags.csv, as_csv), (flags.json, as_json)):
        if path is not None:
            write_output(path, write=functools.partial(Path.write_text, data=text(measurements), encoding="utf-8"))
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if flags.png is not None:
        write_output(flags.png, write=lambda path: plot(measurements, path=path))
        console.print(f"wrote {flags.png}", highlight=False, markup=False, soft_wrap=True)


def _is_link(interface: Interface) -> bool:
    """Return whether its rate is known and it leads to other machines."""
    return interface.up and interface.speed > 0


_BENCHMARKS: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType(
    {"collectives": _collectives, "calibrate": calibrate.main, "disk": disk.main}
)
