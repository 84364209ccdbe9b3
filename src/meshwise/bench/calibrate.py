"""Measure the speed of this machine: `calibrate` returns it as a `Cluster`, from which the simulator predicts times.

All ranks measure at the same time, because they also share caches, memory and links in training. Matrix products are
timed over a grid of shapes, and their efficiency by shape is fitted by three constants (see `MatmulEfficiency`)."""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional

from meshwise.bench.collective_benchmark import SizeSweep, measure
from meshwise.bench.machine import main_memory, processor_name
from meshwise.comm.api.streams import gpu_properties, streams_of
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.memory.malloc_options import keep_freed_memory_of_rank
from meshwise.plan import Plan
from meshwise.simulate.cluster import Cluster, Curve, Device, Link, MatmulEfficiency
from meshwise.simulate.cost_model import SEND_RECV
from meshwise.simulate.predicted_memory import measure as measured
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import TapeOperation, causal_part, count_operation

aten = torch.ops.aten
_MOST_FLOPS = 5e9  # of the largest matrix product; on a GPU 200 times as many


@dataclass(frozen=True)
class CalibrationEffort:
    """Problem sizes and repetitions of a calibration; they decide how long the calibration takes."""

    lengths: tuple[int, ...] = (32, 128, 512, 2048)
    """Lengths from which the dims m, k and n of the matrix products are combined; on a GPU four times as long."""
    sizes: tuple[int, ...] = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)
    """Bytes that operations and collectives move."""
    rounds: int = 5
    """Number of times that every measurement is repeated; the result is the median."""


def calibrate(world: World, *, effort: CalibrationEffort = CalibrationEffort()) -> Cluster:
    """Measure this machine with all ranks, and return a `Cluster`. On CPUs the ranks keep freed memory afterwards."""
    keep_freed_memory_of_rank(world)  # as a trainer does
    seconds = _Stopwatch(world, rounds=effort.rounds)
    dtypes = [torch.float32] if world.device.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
    tiny = seconds.empty(8)
    seconds.launch = seconds(lambda: tiny + tiny, repeat=200)
    products = {dtype: _products(seconds, dtype, effort) for dtype in dtypes}
    best = {dtype: _peak(rows) for dtype, rows in products.items()}
    main = dtypes[-1]
    between, step = _between(world, effort)
    memory = streams_of(world.device).memory
    device = Device(
        name=gpu_properties(world.device).name if world.device.type == "cuda" else f"a core of {processor_name()}",
        kind=world.device.type,
        memory=float(main_memory() // world.size if memory is None else memory.total),
        peak={str(dtype).removeprefix("torch."): rate for dtype, rate in best.items()},
        products=_fitted(products[main], best[main]),
        attention=_fitted(_attention(seconds, main, effort), best[main]),
        bandwidth=_curve(seconds, effort),
        rates=_rates(seconds),
        launch=max(seconds.launch, between),
        step=step,
    )
    # On a CPU the core that computes also copies.
    overlap = world.device.type != "cpu"
    return Cluster(device, ranks_per_node=world.size, inside=_link(world, effort), adapters=1, overlap=overlap)


class _Stopwatch:
    """Times functions that all ranks call at the same time; a call returns the median over all rounds and ranks."""

    def __init__(self, world: World, *, rounds: int) -> None:
        self.world = world
        self.on_gpu = world.device.type == "cuda"
        self._rounds = rounds
        self.launch = 0.0
        """Seconds of a launch, which `without_launch` subtracts."""

    def __call__(self, run: Callable[[], object], *, repeat: int = 1) -> float:
        """Return the median seconds of a call of `run`, called `repeat` times in a row in each round."""
        took = []
        for _ in range(self._rounds + 1):
            self.world.barrier()
            begin = self._now()
            for _ in range(repeat):
                run()
            took.append((self._now() - begin) / repeat)
        return float(statistics.median(itertools.chain.from_iterable(self.world.exchange(took[1:]))))

    def without_launch(self, took: float) -> float:
        """Return the seconds of an operation without its launch."""
        return max(took - self.launch, took / 10)

    def _now(self) -> float:
        if not self.on_gpu:
            return time.thread_time()  # other programs do not change it
        streams_of(self.world.device).synchronize()
        return time.perf_counter()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of random numbers from 0 to 1 on the rank's device."""
        return torch.rand(*shape, device=self.world.device).to(dtype)


_Row = tuple[tuple[int, int, int], float, float]
"""Shape (m, k, n) of a matrix product, its flops and its seconds."""


def _products(seconds: _Stopwatch, dtype: torch.dtype, effort: CalibrationEffort) -> list[_Row]:
    """Time matrix products over a grid of shapes, with the transposed operands of a layer's forward and backward."""
    rows = []
    wide, most = (4, 200 * _MOST_FLOPS) if seconds.on_gpu else (1, _MOST_FLOPS)
    for m, k, n in itertools.product((wide * length for length in effort.lengths), repeat=3):
        flops = 2.0 * m * k * n
        if flops <= most:
            x, y = (seconds.empty(*shape, dtype=dtype) for shape in ((m, k), (k, n)))
            pairs = ((x, y), (x, y.t().contiguous().t()), (x.t().contiguous().t(), y))
            repeat = max(1, min(50, int(most / (150 * flops))))
            took = seconds(functools.partial(_multiply, pairs), repeat=repeat)
            rows.append(((m, k, n), flops, seconds.without_launch(took / len(pairs))))
    return rows


def _peak(rows: Sequence[_Row]) -> float:
    """Return the most flops per second among the largest quarter of the products."""
    largest = sorted(rows, key=lambda row: row[1])[-max(1, len(rows) // 4) :]
    return max(flops / took for _, flops, took in largest)


def _multiply(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, y in pairs:
        torch.mm(x, y)


def _fitted(rows: Sequence[_Row], peak: float) -> MatmulEfficiency:
    """Return the constants that fit the rows best: least squared error of log(seconds), weighted by the seconds."""
    weights = [took for _, _, took in rows]

    def fit(inner: float, outputs: float) -> tuple[float, MatmulEfficiency]:
        """Return the error of the two constants with the best third one, and the three constants."""
        shape = MatmulEfficiency(1.0, inner, outputs)
        logs = [
            math.log(flops / (took * peak * shape.efficiency(inner=k, outputs=m * n)))
            for (m, k, n), flops, took in rows
        ]
        best = statistics.fmean(logs, weights)
        error = sum(weight * (log - best) ** 2 for weight, log in zip(weights, logs, strict=True))
        return error, MatmulEfficiency(min(1.0, math.exp(best)), inner, outputs)

    halves = [0.0, *(2.0**power for power in range(1, 22))]
    return min((fit(*one) for one in itertools.product(halves[:10], halves)), key=lambda one: one[0])[1]


def _attention(seconds: _Stopwatch, dtype: torch.dtype, effort: CalibrationEffort) -> list[_Row]:
    """Time fused causal attention, forward and backward. A row's shape is (number of queries, number of keys, 1)."""
    rows = []
    batch, heads, width = 4, 4, 64
    for length in (length for length in effort.lengths if length <= 1024):
        q = seconds.empty(batch, heads, length, width, dtype=dtype).requires_grad_()
        attend = functools.partial(functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        output = attend()
        back = functools.partial(torch.autograd.grad, output, q, output.detach(), retain_graph=True)
        flops = 4.0 * batch * heads * length * length * width * causal_part(length, cpu=not seconds.on_gpu)
        shape = (batch * heads * length, length, 1)
        rows.append((shape, flops, seconds.without_launch(seconds(attend, repeat=3))))
        rows.append((shape, 2.5 * flops, seconds.without_launch(seconds(back, repeat=3))))
    return rows


def _curve(seconds: _Stopwatch, effort: CalibrationEffort) -> Curve:
    """Return the bytes per second of adding two tensors, by the bytes read and written."""
    found: list[tuple[float, float]] = []
    for size in effort.sizes:
        count = max(1, size // 12)
        x, y = (seconds.empty(count) for _ in range(2))
        took = seconds(functools.partial(torch.add, x, y), repeat=max(1, min(100, (1 << 24) // size)))
        found.append((12.0 * count, 12.0 * count / seconds.without_launch(took)))
    return tuple(found)


def _rates(seconds: _Stopwatch) -> Mapping[str, float]:
    """Return the bytes per second of operations that are slower than a CPU core's memory, by name; empty on a GPU."""
    if seconds.on_gpu:
        return {}
    x = seconds.empty(512, 1024)
    weight, rows = seconds.empty(1024), torch.arange(512)
    norm = aten.native_layer_norm(x, [1024], weight, weight, 1e-5)
    kinds: Mapping[OpOverload, tuple[Any, ...]] = {
        aten.gelu.default: (x,),
        aten.gelu_backward.default: (x, x),
        aten.silu.default: (x,),
        aten.silu_backward.default: (x, x),
        aten.tanh.default: (x,),
        aten.sum.dim_IntList: (x, [0]),
        aten.native_layer_norm.default: (x, [1024], weight, weight, 1e-5),
        aten.native_layer_norm_backward.default: (x, x, [1024], *norm[1:], weight, weight, [True] * 3),
        aten._log_softmax.default: (x, -1, False),
        aten._log_softmax_backward_data.default: (x, x, -1, torch.float32),
        aten._softmax.default: (x, -1, False),
        aten._softmax_backward_data.default: (x, x, -1, torch.float32),
        aten.embedding_dense_backward.default: (x, rows, 512, -1, False),
    }
    found = {}
    for func, args in kinds.items():
        one = count_operation(func, args=args, kwargs={}, output=func(*args))
        found[one.name] = one.bytes / seconds.without_launch(seconds(functools.partial(func, *args), repeat=3))
    return found


def _between(world: World, effort: CalibrationEffort) -> tuple[float, float]:
    """Return the overhead of an operation in training, and the overhead of a training step, in seconds.

    Every rank trains two models of tiny layers, which differ in the number of operations. A line through the two step
    times gives the overheads: its slope, and its value at zero operations."""
    plan = Plan.parse("dp=1")
    device: Literal["cpu", "cuda"] = "cpu" if world.device.type == "cpu" else "cuda"
    counts, times = [], []
    for depth in (2, 34):
        layers = functools.partial(lambda depth: nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), depth)
        subject = RehearsalSubject(layers, lambda output, batch: (output.square().sum(), len(batch)), torch.zeros(1, 8))
        parts = rehearse(subject, plan=plan, ranks=1, device=device).steps[0]
        counts.append(sum(isinstance(entry, TapeOperation) for part in parts for entry in part.entries))
        alone = functools.partial(measured, subject=subject, plan=plan, steps=4 * effort.rounds)
        world.barrier()
        times.append(max(world.exchange(run_threads(1, alone)[0][0].step)))
    each = max(0.0, (times[1] - times[0]) / (counts[1] - counts[0]))
    return each, max(0.0, times[0] - each * counts[0])


def _link(world: World, effort: CalibrationEffort) -> Link:
    """Measure the latency and the bus bandwidth among all ranks of the machine; a default `Link` for one rank."""
    if world.size == 1:
        return Link()
    # Training makes the tensors of these collectives with `World.empty`; it sends ordinary tensors as messages.
    sums = ("all_reduce", "all_gather", "reduce_scatter")
    measured_links: dict[tuple[str, int], tuple[float, float]] = {
        (one.kind, one.bytes): (one.median_seconds, one.bus_bandwidth)
        for on, each in {"shared": sums, "ordinary": (SEND_RECV,)}.items()
        for one in measure(world, sweep=SizeSweep(each, (64, *effort.sizes), (world.size,), effort.rounds, on=(on,)))
        if one.kind in each
    }
    measured_links = world.exchange(measured_links)[0]
    smallest = min(size for _, size in measured_links)
    whole = measured_links["all_reduce", smallest][0]
    latency = whole / math.ceil(math.log2(world.size))

    def curve(kind: str) -> Curve:
        """Return the bus bandwidth by bytes, without the time before the first byte."""
        before = latency if kind == SEND_RECV else whole
        rows = [(size, *row) for (one, size), row in sorted(measured_links.items()) if one == kind and size > smallest]
        return tuple((float(size), rate * took / max(took - before, took / 10)) for size, took, rate in rows)

    apart = {kind: curve(kind) for kind in (*sums[1:], SEND_RECV)}
    return Link(latency=latency, bandwidth=curve("all_reduce"), collectives=apart)
