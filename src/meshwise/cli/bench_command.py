"""The command `meshwise bench`: measure the collectives of this machine, or its speed for the simulator."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tomlkit

from meshwise.bench import collective_benchmark as benchmark
from meshwise.bench.calibrate import CalibrationEffort, calibrate
from meshwise.cli import shared_flags
from meshwise.comm.api.launcher_info import prints_for_job
from meshwise.comm.api.streams import gpu_count
from meshwise.comm.launch.launch import cores, run
from meshwise.simulate.cluster import Cluster
from meshwise.train.console_output import console_of_width, counted, text_table
from meshwise.train.flags_and_toml import parse_flags
from meshwise.train.job_settings import JobError, as_job_error, check_least


@dataclass(frozen=True)
class BenchFlags:
    """Flags that both benchmarks have."""

    ranks: int | None = None
    """Local ranks to start; ignored under torchrun. Default: one for each GPU; without GPUs the cores, at most 4."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; auto: the GPUs if there are any, else the CPU."""
    rounds: int = 5
    """Number of times that every measurement is repeated."""
    comm: Literal["auto", "local", "gloo"] = "auto"
    """How ranks on CPUs of one host communicate. local: through shared memory; gloo: by messages; auto: through shared
    memory where possible, unless MESHWISE_COMM names another way. For `calibrate` give the value that training uses."""

    def __post_init__(self) -> None:
        check_least(self, least=1, names="ranks rounds")


@dataclass(frozen=True)
class CollectivesFlags(BenchFlags):
    """Time every collective over tensor sizes and group sizes, and a copy in memory for comparison."""

    collectives: tuple[str, ...] = tuple(kind for kind in benchmark.CALLS if kind != benchmark.COPY)
    """The collectives to time."""
    sizes: tuple[str, ...] = ("4K", "64K", "1M", "4M", "16M", "64M")
    """Bytes of the full tensor, as in 4K or 64M."""
    groups: tuple[int, ...] = ()
    """Numbers of ranks in a group. Default: all numbers from 2 up that divide the number of ranks."""
    on: tuple[Literal["ordinary", "shared", "joint", "gloo"], ...] = ("ordinary",)
    """Memory and transport. ordinary: any tensors. shared: tensors in memory that all ranks can read, with all_gather
    in place. joint: one tensor for all ranks, all_gather only. gloo: torch's collectives over gloo on CPU tensors."""
    json: Path | None = None
    """Write the measurements here as JSON: times in seconds, bandwidths in bytes per second."""
    png: Path | None = None
    """Draw bus bandwidth over tensor size as a PNG here; needs the extra `plot`."""


def main(words: Sequence[str]) -> int:
    """Run the benchmark that the first word names, and return the exit status. Raises JobError for bad flags."""
    return shared_flags.run_chosen(words, command="bench", kind="benchmark", choices=_BENCHMARKS)


def _collectives(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise bench collectives", default=CollectivesFlags())
    size, comm = _ranks(flags, least=2), shared_flags.checked_comm(flags.comm)
    shared_flags.check_outputs((flags.json, flags.png))
    shared_flags.require_matplotlib(flags.png)
    with as_job_error():
        sweep = benchmark.SizeSweep(
            kinds=flags.collectives,
            sizes=tuple(benchmark.parse_size(text) for text in flags.sizes),
            groups=flags.groups or benchmark.group_sizes(size),
            rounds=flags.rounds,
            on=flags.on,
        )
        sweep.check(world_size=size)
    shared_flags.say_start(size, words=["bench", "collectives", *words])
    measurements = run(size, partial(benchmark.measure, sweep=sweep), device=_device(flags), comm=comm)[0]
    if prints_for_job():
        if {one.kind for one in measurements} == {benchmark.COPY} != set(flags.collectives):
            raise JobError("no collective was measured: these ranks have no shared memory; use --on ordinary")
        console = console_of_width(110)
        console.show(text_table(benchmark.as_table(measurements)))
        console.show(
            "Time of the slowest rank. Bus bandwidth as nccl-tests defines it. Copy: at the same time, "
            "each rank of the group copies a tensor of this size in its own memory."
        )
        text = json.dumps(benchmark.rows(measurements), indent=1) + "\n"
        shared_flags.write_and_say(flags.json, write=lambda path: path.write_text(text, encoding="utf-8"))
        shared_flags.write_and_say(flags.png, write=lambda path: benchmark.plot(measurements, path=path))


@dataclass(frozen=True)
class CalibrationFlags(BenchFlags):
    """Measure how fast this machine computes, copies and sends with all ranks at work; write a cluster file."""

    output: Path = Path("cluster.toml")
    """The cluster file to write, which `meshwise simulate --on` reads."""


def _calibrate(words: Sequence[str]) -> None:
    flags = parse_flags(words, prog="meshwise bench calibrate", default=CalibrationFlags())
    device = _device(flags)
    shared_flags.check_outputs([flags.output])
    size, comm = _ranks(flags, least=1), shared_flags.checked_comm(flags.comm)
    shared_flags.say_start(size, words=["bench", "calibrate", *words])
    measure = partial(calibrate, effort=CalibrationEffort(rounds=flags.rounds))
    cluster: Cluster = run(size, measure, device=device, comm=comm)[0]
    if prints_for_job():
        text = tomlkit.dumps(dataclasses.asdict(cluster))
        result = f": {cluster.device.name}, {counted(size, of='rank')}"
        shared_flags.write_and_say(flags.output, write=lambda path: path.write_text(text, "utf-8"), more=result)


def _ranks(flags: BenchFlags, *, least: int) -> int:
    """Return the number of ranks: torchrun's, else `--ranks`, else GPUs, else cores (at least `least`, at most 4)."""
    if launched := shared_flags.launched_ranks():
        return launched
    gpus = gpu_count() if flags.device != "cpu" else 0
    return flags.ranks or gpus or max(least, min(shared_flags.DEFAULT_RANKS, cores()))


def _device(flags: BenchFlags) -> Literal["cpu", "cuda"] | None:
    """Return the value of `--device`, None for auto. Raises JobError for CUDA without a GPU."""
    if flags.device == "cuda" and not gpu_count():
        raise JobError("--device cuda, but torch sees no GPU; use --device cpu, or run `meshwise doctor`")
    return None if flags.device == "auto" else flags.device


_BENCHMARKS: Mapping[str, Callable[[Sequence[str]], None]] = {"collectives": _collectives, "calibrate": _calibrate}
