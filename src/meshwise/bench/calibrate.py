"""Measures the machine it runs on, as the few numbers that a simulation needs of a cluster.

All ranks measure at the same time, as they compute in training: they share caches, memory and links. What a matrix
product reaches by its shape is measured over a grid of shapes and fitted by three constants (see `Products`); every
other number is a median of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.bench.collectives import Sweep, measure
from meshwise.comm.thread_world import run_threads
from meshwise.comm.world import World
from meshwise.plan import Plan
from meshwise.simulate.cluster import Cluster, Curve, Device, Link, Products
from meshwise.simulate.measure import measure as measured
from meshwise.simulate.rehearsal import Subject, rehearse
from meshwise.simulate.tape import Operation

aten = torch.ops.aten


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    lengths: tuple[int, ...] = (32, 128, 512, 2048)
    """Of each dim of a matrix product."""

    sizes: tuple[int, ...] = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)
    """Bytes that operations and collectives move."""

    rounds: int = 5
    """Times that everything takes its turn; the median counts."""

    most_flops: float = 2e9
    """Of one product: larger ones are left out."""


def calibrate(world: World, *, effort: Effort = Effort()) -> Cluster:
    """Describe this machine by measuring it. Every rank calls it, and gets what the slowest of them has measured."""
    seconds = _Stopwatch(world, rounds=effort.rounds)
    dtypes = [torch.float32] if world.device.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
    launch = _launch(seconds)
    products = {dtype: _products(seconds, dtype, effort, launch) for dtype in dtypes}
    best = {dtype: max(flops / took for (_, flops, took) in rows) for dtype, rows in products.items()}
    main = dtypes[-1]
    moved = _curve(seconds, effort, launch)
    between, step = _between(world, effort)
    device = Device(
        name=_name(world.device),
        kind=world.device.type,
        memory=float(_memory(world)),
        peak={str(dtype).removeprefix("torch."): rate for dtype, rate in best.items()},
        products=_fitted(products[main], best[main]),
        attention=_attention(seconds, main, best[main], launch),
        bandwidth=moved,
        rates=_rates(seconds, launch),
        launch=max(launch, between),
        step=step,
    )
    # The core that computes is the one that copies.
    overlap = world.device.type != "cpu"
    return Cluster(device, ranks_per_node=world.size, inside=_link(world, effort), adapters=1, overlap=overlap)


class _Stopwatch:
    """Times what all ranks do at once; the slowest rank's median."""

    def __init__(self, world: World, *, rounds: int) -> None:
        self.world = world
        self._rounds = rounds

    def __call__(self, run: Callable[[], object], *, repeat: int = 1) -> float:
        """Seconds of one run."""
        took = []
        for _ in range(self._rounds + 1):
            self.world.barrier()
            begin = self._now()
            for _ in range(repeat):
                run()
            took.append((self._now() - begin) / repeat)
        slowest: float = max(self.world.exchange(statistics.median(took[1:])))
        return slowest

    def _now(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor to compute with."""
        return torch.rand(*shape, device=self.world.device).to(dtype)


_Row = tuple[tuple[int, int, int], float, float]


def _products(seconds: _Stopwatch, dtype: torch.dtype, effort: Effort, launch: float) -> list[_Row]:
    """((m, k, n), flops, seconds) over the grid."""
    rows = []
    for m, k, n in itertools.product(effort.lengths, repeat=3):
        flops = 2.0 * m * k * n
        if flops <= effort.most_flops:
            x, y = seconds.empty(m, k, dtype=dtype), seconds.empty(k, n, dtype=dtype)
            took = seconds(lambda x=x, y=y: torch.mm(x, y), repeat=max(1, min(50, int(1e8 / flops))))  # type: ignore[misc]
            rows.append(((m, k, n), flops, max(took - launch, took / 10)))
    return rows


def _fitted(rows: Sequence[_Row], peak: float) -> Products:
    """The constants that come closest, by the sum of squared errors of the logarithm over a grid of them."""

    def error(products: Products) -> float:
        told = (
            math.log(took * peak * products.efficiency(inner=k, outputs=m * n) / flops)
            for (m, k, n), flops, took in rows
        )
        return sum(one**2 for one in told)

    halves = [0.0, *(2.0**power for power in range(1, 22))]
    shapes = [Products(1.0, inner, outputs) for inner, outputs in itertools.product(halves[:10], halves)]
    return min((_levelled(one, rows, peak) for one in shapes), key=error)


def _levelled(shape: Products, rows: Sequence[_Row], peak: float) -> Products:
    """With the best `best` for its other constants."""
    logs = [
        math.log(flops / (took * peak * shape.efficiency(inner=k, outputs=m * n))) for (m, k, n), flops, took in rows
    ]
    return Products(math.exp(statistics.fmean(logs)), shape.inner, shape.outputs)


def _attention(seconds: _Stopwatch, dtype: torch.dtype, peak: float, launch: float) -> Products:
    """Fused causal attention at a usual size; its flops are counted as if nothing were masked."""
    batch, heads, length, width = 4, 4, 256, 64
    q = seconds.empty(batch, heads, length, width, dtype=dtype)
    took = seconds(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True), repeat=3) - launch
    flops = 4.0 * batch * heads * length * length * width
    return Products(best=flops / (took * peak))


def _curve(seconds: _Stopwatch, effort: Effort, launch: float) -> Curve:
    """Bytes per second of a sum of two tensors into a third."""
    found: list[tuple[float, float]] = []
    for size in effort.sizes:
        count = max(1, size // 12)
        x, y, z = (seconds.empty(count) for _ in range(3))
        took = seconds(lambda x=x, y=y, z=z: torch.add(x, y, out=z), repeat=max(1, min(100, (1 << 24) // size)))  # type: ignore[misc]
        found.append((12.0 * count, 12.0 * count / max(took - launch, took / 10)))
    return tuple(found)


def _rates(seconds: _Stopwatch, launch: float) -> Mapping[str, float]:
    """Bytes per second of operations that compute more than they move."""
    x = seconds.empty(512, 1024)
    other = torch.empty_like(x)
    norm = aten.native_layer_norm(x, [1024], None, None, 1e-5)
    soft = aten._log_softmax(x, -1, False)  # noqa: FBT003 - torch's own
    probability = aten._softmax(x, -1, False)  # noqa: FBT003
    runs: Mapping[str, tuple[int, Callable[[], object]]] = {
        "gelu": (2, lambda: aten.gelu.out(x, out=other)),
        "gelu_backward": (3, lambda: aten.gelu_backward(x, x)),
        "native_layer_norm": (2, lambda: aten.native_layer_norm(x, [1024], None, None, 1e-5)),
        "native_layer_norm_backward": (
            3,
            lambda: aten.native_layer_norm_backward(x, x, [1024], norm[1], norm[2], None, None, [True, False, False]),
        ),
        "_log_softmax": (2, lambda: aten._log_softmax(x, -1, False)),  # noqa: FBT003
        "_log_softmax_backward_data": (3, lambda: aten._log_softmax_backward_data(x, soft, -1, torch.float32)),
        "_softmax": (2, lambda: aten._softmax(x, -1, False)),  # noqa: FBT003
        "_softmax_backward_data": (3, lambda: aten._softmax_backward_data(x, probability, -1, torch.float32)),
    }
    size = x.numel() * x.element_size()
    return {
        name: tensors * size / max(took - launch, took / 10)
        for name, (tensors, run) in runs.items()
        for took in [seconds(run)]
    }


def _launch(seconds: _Stopwatch) -> float:
    """Of an operation on next to nothing."""
    x = seconds.empty(8)
    return seconds(lambda: x + x, repeat=200)


def _between(world: World, effort: Effort) -> tuple[float, float]:
    """Seconds of each operation of a training, and of each step, beside what they compute: of next to nothing.

    Every rank trains two models alone at the same time, which differ in how many operations they are.
    """
    plan = Plan.parse("dp=1")
    device: Literal["cpu", "cuda"] = "cpu" if world.device.type == "cpu" else "cuda"
    counts, times = [], []
    for depth in (2, 34):
        layers = functools.partial(_layers, depth)
        subject = Subject(layers, lambda output, batch: (output.square().sum(), len(batch)), torch.zeros(1, 8))
        parts = rehearse(subject, plan=plan, ranks=1, device=device).step(0)
        counts.append(sum(isinstance(entry, Operation) for part in parts for entry in part.entries))
        alone = functools.partial(measured, subject=subject, plan=plan, steps=4 * effort.rounds)
        world.barrier()
        took: float = run_threads(1, alone)[0][0].step
        times.append(max(world.exchange(took)))
    each = max(0.0, (times[1] - times[0]) / (counts[1] - counts[0]))
    return each, max(0.0, times[0] - each * counts[0])


def _layers(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))


def _link(world: World, effort: Effort) -> Link:
    """Latency and bus bandwidth among all ranks of the machine."""
    if world.size == 1:
        return Link()
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    sweep = Sweep(kinds=kinds, sizes=(64, *effort.sizes), groups=(world.size,), rounds=effort.rounds)
    told: dict[tuple[str, int], tuple[float, float]] = {
        (one.kind, one.bytes): (one.median_seconds, one.bus_bandwidth)
        for one in measure(sweep, world=world)
        if one.kind in kinds
    }
    told = world.exchange(told)[0]
    smallest = min(size for _, size in told)
    latency = told["all_reduce", smallest][0] / math.ceil(math.log2(world.size))

    def curve(kind: str) -> Curve:
        rows = sorted((float(size), rate) for (one, size), (_, rate) in told.items() if one == kind and size > smallest)
        return tuple(rows)

    return Link(latency, curve("all_reduce"), {kind: curve(kind) for kind in kinds[1:]})


def _memory(world: World) -> int:
    """Bytes for each rank."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    with open("/proc/meminfo", encoding="utf-8") as file:  # noqa: PTH123
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal"))
    return total // world.size


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"a core of {models[0] if models else 'a CPU'}"
