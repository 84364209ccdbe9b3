"""Time the collectives of a World over tensor sizes and group sizes; return the times, and draw them as a PNG.

docs/benchmarks.md says what a sample is, how samples of different kinds take turns, and which figures can be compared
("Collectives"). A collective that copies cannot be faster than the `copy` beside it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.base.text_format import time_text
from meshwise.comm.api.flight_recorder import bus_factor
from meshwise.comm.api.world import Work, World
from meshwise.comm.network.choose_world import Call, gloo_calls
from meshwise.plan.plan_keys import read_size
from meshwise.simulate.predicted_memory import size_text

VARIANTS = ("ordinary", "shared", "joint", "gloo")
"""Kinds of memory and transport on which a collective can be measured; `Measurement.on` explains each."""

_COLUMNS = 3
_AXIS = "ring"
_CALLS_BYTES = 64 << 20
_CALLS_MOST = 100
_UNTIMED = 10  # timed calls for each untimed call

COPY = "copy"
"""Name of the measurement in which every rank copies a tensor within its own memory."""


@dataclass(frozen=True)
class Measurement:
    """Measured times of one collective, at one size of the full tensor, in one group of ranks.

    | kind        name of the collective, a key of `CALLS`
    | …_seconds   of one call on the slowest rank: the median and the minimum over all rounds
    | on          `ordinary` tensors; `shared` tensors of `World.empty`; one `joint` tensor of `World.shared_empty` for
    |             all ranks; or `gloo`, torch's collectives over gloo on ordinary tensors"""

    kind: str
    ranks: int
    bytes: int
    median_seconds: float
    min_seconds: float
    on: str = "ordinary"

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the full tensor per second of the median call."""
        return self.bytes / self.median_seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that the slowest link would carry under a perfect algorithm, from the median call."""
        return self.algorithm_bandwidth * bus_factor(self.kind, ranks=self.ranks)


@dataclass(frozen=True)
class SizeSweep:
    """The measurements to make: every collective, at every size, in every group size, on every kind of memory.

    | kinds    names of collectives, keys of `CALLS`
    | sizes    bytes of the full tensor
    | groups   numbers of ranks in a group; each divides the number of ranks of the world
    | rounds   rounds whose times count, after `warmup` rounds whose times are dropped
    | on       kinds of memory and transport, out of `VARIANTS`"""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    rounds: int = 5
    warmup: int = 1
    on: tuple[str, ...] = ("ordinary",)

    def check(self, *, world_size: int) -> None:
        """Raise ValueError, naming the choices, if a world of `world_size` ranks cannot make these measurements."""
        if unknown := set(self.kinds) - CALLS.keys():
            raise ValueError(f"no collective {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
        possible = group_sizes(world_size)
        if wrong := [n for n in self.groups if n not in possible]:
            listed = ", ".join(map(str, possible)) or "no"
            raise ValueError(f"{world_size} ranks have no groups of {wrong[0]}; groups may have {listed} ranks")
        if not (self.kinds and self.sizes and self.groups and self.on) or self.rounds < 1:
            raise ValueError("nothing to measure: name a collective, a size, a group, what to measure on, and a round")
        if set(self.on) == {"joint"} and "all_gather" not in self.kinds:
            raise ValueError("nothing to measure: on joint memory only all_gather is measured; name it")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `4096` or `4K` (4 · 1024). Raises ValueError for zero and for other text."""
    if not (size := read_size(text)):
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T: 4K, 64M")
    return size


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Return the group sizes from 2 up that divide the size of the world."""
    return tuple(n for n in range(2, world_size + 1) if world_size % n == 0)


def _part(world: World, x: Tensor) -> Tensor:
    """Return this rank's part of the full tensor `x`: one of `n` equal parts."""
    return x.view(world.mesh.degree(_AXIS), -1)[world.group(_AXIS).index]


def _on_root(world: World, x: Tensor) -> Tensor | None:
    return x if world.group(_AXIS).index == 0 else None


def _send_recv(world: World, x: Tensor, y: Tensor) -> list[Work]:
    """Send `x` to the next rank of a ring, and receive `y` from the previous rank."""
    group = world.group(_AXIS)
    world.prepare(lines=[(rank, group.ranks[(at + 1) % group.size]) for at, rank in enumerate(group.ranks)])
    return [
        world.send(x, axis=_AXIS, to=(group.index + 1) % group.size),
        world.recv(y, axis=_AXIS, source=(group.index - 1) % group.size),
    ]


def _copy(_: World, x: Tensor, y: Tensor) -> list[Work]:
    y.copy_(x)
    return []


CALLS: Mapping[str, Call] = {
    "all_reduce": lambda world, x, _: [world.all_reduce(x, axes=_AXIS)],
    "reduce_scatter": lambda world, x, y: [world.reduce_scatter(x, into=_part(world, y), axes=_AXIS)],
    "all_gather": lambda world, x, y: [world.all_gather(_part(world, x), into=y, axes=_AXIS)],
    "all_to_all": lambda world, x, y: [world.all_to_all(x, into=y, axes=_AXIS)],
    "broadcast": lambda world, x, _: [world.broadcast(x, axes=_AXIS)],
    "reduce": lambda world, x, _: [world.reduce(x, axes=_AXIS)],
    "gather": lambda world, x, y: [world.gather(_part(world, x), into=_on_root(world, y), axes=_AXIS)],
    "scatter": lambda world, x, y: [world.scatter(_on_root(world, x), into=_part(world, y), axes=_AXIS)],
    "send_recv": _send_recv,
    COPY: _copy,
}
"""Collectives that can be measured, by name, and the copy."""


def _gather_in_place(world: World, _: Tensor, y: Tensor) -> list[Work]:
    """Gather in memory that other ranks can read: each rank's part is in the result already."""
    return [world.all_gather(_part(world, y), into=y, axes=_AXIS)]


def measure(world: World, *, sweep: SizeSweep) -> list[Measurement]:
    """Make and return the measurements of `sweep`, and of a copy at every size. Every rank of the world calls this.

    A group of n ranks is the ranks 0 … n-1. A rank gets the measurements of its groups, so rank 0 gets all. Sizes are
    rounded down to a multiple of n floats, but at least n. Kinds of memory, and collectives, that this world does not
    have are left out. Raises ValueError as `SizeSweep.check` does."""
    sweep.check(world_size=world.size)
    measurements: list[Measurement] = []
    for n in sweep.groups:
        group = world.over(Mesh.of(rest=world.size // n, ring=n))
        gloo = gloo_calls(world, size=n) if "gloo" in sweep.on else {}
        if world.rank < n:
            measurements += _measure_group(group, sweep, gloo)
        else:
            for _ in range(sweep.warmup + sweep.rounds):  # to the watchdog, a rank that calls nothing is lost
                group.barrier()
    return measurements


def _measure_group(world: World, sweep: SizeSweep, gloo: Mapping[str, Call]) -> list[Measurement]:
    n = world.mesh.degree(_AXIS)
    counts = sorted({max(1, size // (4 * n)) * n for size in sweep.sizes})
    kinds = [kind for kind in sweep.kinds if kind != COPY]
    shared = {**CALLS, "all_gather": _gather_in_place}
    calls = {"ordinary": CALLS, "shared": shared, "joint": {"all_gather": _gather_in_place}, "gloo": gloo}
    buffers = {on: _buffers(world, on, counts) for on in dict.fromkeys((*sweep.on, "ordinary"))}
    asked = [(kind, on) for kind in kinds for on in sweep.on if buffers[on] and kind in calls[on]]
    asked.append((COPY, "ordinary"))
    samples: dict[tuple[str, str, int], list[float]] = {(kind, on, count): [] for kind, on in asked for count in counts}
    orders = [sorted(samples, key=lambda one: (one[2], sign * VARIANTS.index(one[1]))) for sign in (1, -1)]
    for turn in range(sweep.warmup + sweep.rounds):
        for kind, on, count in orders[turn % 2]:
            sample = _sample(world, calls[on][kind], buffers[on][count])
            if turn >= sweep.warmup:
                samples[kind, on, count].append(sample)
        world.barrier()
    slowest = torch.tensor(list(samples.values()), dtype=torch.float64, device=world.device)
    world.all_reduce(slowest, axes=_AXIS, op="max").wait()
    return [
        Measurement(kind, n, 4 * count, statistics.median(seconds), min(seconds), on)
        for (kind, on, count), seconds in zip(samples, slowest.tolist(), strict=True)
    ]


def _buffers(world: World, on: str, elements: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return two tensors of zeros for each size (`joint`: one tensor, twice); {} if the world has no such memory.

    Zeros keep sums finite, and writing them brings all pages into memory."""
    makes: Mapping[str, Callable[[int], Tensor | None]] = {
        "shared": lambda count: world.empty(count, dtype=torch.float32),
        "joint": lambda count: world.shared_empty(count, dtype=torch.float32, axes=_AXIS),
    }
    make = makes.get(on, lambda count: torch.empty(count, dtype=torch.float32, device=world.device))
    made = {count: (make(count), make(count)) if on != "joint" else (make(count),) * 2 for count in elements}
    return {count: (x.zero_(), y.zero_()) for count, (x, y) in made.items() if x is not None and y is not None}


def _sample(world: World, call: Call, buffers: tuple[Tensor, Tensor]) -> float:
    """Time several calls and return the seconds per call on this rank."""
    calls = max(1, min(_CALLS_MOST, _CALLS_BYTES // (4 * buffers[0].numel())))
    if calls > 1:
        _call(world, call, buffers, -(-calls // _UNTIMED))
    world.barrier(axes=_AXIS)
    streams = world.streams
    streams.synchronize()
    start = streams.mark(timing=True)
    _call(world, call, buffers, calls)
    end = streams.mark(timing=True)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def _call(world: World, call: Call, buffers: tuple[Tensor, Tensor], calls: int) -> None:
    for _ in range(calls):
        for work in call(world, *buffers):
            work.wait()


def rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return one flat dict for each measurement, sorted by collective: seconds, and bandwidths in bytes per second.
    `share_of_copy` is bus bandwidth / copy bandwidth, for a plain copy of as many bytes by as many ranks."""
    names = ("ranks", "bytes", "on", "median_seconds", "min_seconds", "algorithm_bandwidth", "bus_bandwidth")
    copies = {(one.ranks, one.bytes): one.bus_bandwidth for one in measurements if one.kind == COPY}
    found = []
    for one in sorted(measurements, key=lambda one: (list(CALLS).index(one.kind), one.ranks, one.bytes, one.on)):
        own, copy = {name: getattr(one, name) for name in names}, copies[one.ranks, one.bytes]
        found.append({"collective": one.kind, **own, "copy_bandwidth": copy, "share_of_copy": one.bus_bandwidth / copy})
    return found


def as_table(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Return a table for the terminal, titles first: times, and bandwidths in GB/s (10^9 bytes per second)."""
    times, speeds = ("median", "min"), ("algorithm GB/s", "bus GB/s", "copy GB/s", "bus/copy")
    table: list[tuple[str, ...]] = [("collective", "ranks", "size", "on", *times, *speeds)]
    for row in rows(measurements):
        if row["collective"] != COPY:
            what = (row["collective"], str(row["ranks"]), size_text(row["bytes"]), row["on"])
            seconds = (time_text(row[name]) for name in ("median_seconds", "min_seconds"))
            rates = (f"{row[f'{name}_bandwidth'] / 1e9:.3f}" for name in ("algorithm", "bus", "copy"))
            table.append((*what, *seconds, *rates, f"{row['share_of_copy']:.0%}"))
    return table


def plot(measurements: Sequence[Measurement], *, path: Path) -> None:
    """Draw the measurements on ordinary tensors as a PNG. Raises ImportError without matplotlib, and OSError."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    kinds = [kind for kind in dict.fromkeys(one.kind for one in measurements) if kind != COPY]
    height = -(-len(kinds) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 3 * height), layout="constrained")
    for index, kind in enumerate(kinds):
        panel = figure.add_subplot(height, _COLUMNS, index + 1)
        for number, ranks in enumerate(sorted({one.ranks for one in measurements})):
            for drawn, style in ((kind, "o-"), (COPY, "--")):
                line = [one for one in measurements if (one.kind, one.ranks, one.on) == (drawn, ranks, "ordinary")]
                sizes, rates = [one.bytes for one in line], [one.bus_bandwidth / 1e9 for one in line]
                label = f"{ranks} ranks" + (", copy" if drawn == COPY else "")
                panel.plot(sizes, rates, style, color=f"C{number}", markersize=3, label=label)
        panel.set(title=kind, yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        panel.set_xscale("log", base=2)
        panel.grid(visible=True, alpha=0.3)
        if index == 0:
            panel.legend(fontsize="x-small")
    figure.savefig(path, dpi=120, format="png")
