"""Compute the seconds that operations, collectives and offloaded state take on a cluster.

`step_seconds` adds the time of offloaded state; docs/memory.md says when each kind moves ("The update"). If optimizer
state is off the GPU, the host runs the update; gradients and parameters on the GPU then cross the link once."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwise.comm.api.flight_recorder import StepPhase, bus_factor
from meshwise.pipeline.schedules.schedule_table import COMPUTE
from meshwise.plan.plan_keys import Offload
from meshwise.simulate.cluster import Cluster, Curve, rate_at
from meshwise.simulate.step_tape import Entry, Tape, TapeCall, TapeOperation, TapeSegment, TapeWait, TierTraffic

FUSED = ("_fused_adam", "_fused_sgd_", "_softmax", "native_layer_norm", "native_dropout")
"""First letters of operations that torch already runs as one kernel; `Device.fused` does not reduce their bytes."""

SEND_RECV = "send_recv"
"""Name of point-to-point messages in `Link.collectives`."""


@dataclass
class CostModel:
    """Seconds of operations and collectives on one cluster; the results for operations are cached."""

    cluster: Cluster
    shift: int = 0
    """Number to add to the ranks of a call, if the tape was recorded on another rank."""
    _known: dict[TapeOperation, float] = field(default_factory=dict)
    _spread: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def seconds(self, operation: TapeOperation) -> float:
        """Return the seconds of one operation on the device, without `Device.launch`."""
        if operation not in self._known:
            self._known[operation] = self._seconds(operation)
        return self._known[operation]

    def _seconds(self, operation: TapeOperation) -> float:
        device = self.cluster.device
        if operation.product is None:
            own = device.rates.get(operation.name)
            if own is not None:
                return device.kernel + operation.bytes / own
            moved = operation.bytes * (1.0 if operation.name.startswith(FUSED) else device.fused)
            return device.kernel + moved / rate_at(device.bandwidth, size=moved)
        one = operation.product
        attention = "attention" in operation.name
        curve = device.attention if attention else device.products
        inner, outputs = (one.n, one.batch * one.m) if attention else (one.k, one.batch * one.m * one.n)
        peak = device.peak_of(operation.dtype)
        computing = operation.flops * operation.part / (peak * curve.efficiency(inner=inner, outputs=outputs))
        return device.kernel + max(computing, operation.bytes / rate_at(device.bandwidth, size=operation.bytes))

    def collective(self, call: TapeCall) -> float:
        """Return the seconds of one collective or message. It assumes that other groups run the same call."""
        kind = SEND_RECV if call.record.point_to_point else call.record.kind
        size, ranks = call.record.bytes, call.ranks
        count = len(ranks)
        if kind == "barrier":
            return self._latency(ranks) * math.ceil(math.log2(count))
        moved = size * bus_factor(kind, ranks=count)
        waited = self._latency(ranks) * (1 if kind == SEND_RECV else math.ceil(math.log2(count)))
        if kind in ("all_gather", "reduce_scatter") and (nodes := self._nodes(ranks)) > 1:
            between, inside = self.cluster.between, self.cluster.inside  # these run as a ring of all ranks
            waited = max(waited, (nodes - 1) * between.hop + (count - nodes) * inside.hop)
        return waited + moved / self._rate(kind, size, ranks)

    def leaving(self, kind: str, *, ranks: tuple[int, ...]) -> float:
        """Return the mean share of the bytes of a collective that a rank sends to other nodes.

        A ring leaves each of its nodes at one rank. In an all-to-all every rank sends to every other one."""
        nodes, count = self._nodes(ranks), len(ranks)
        if nodes == 1:
            return 0.0
        return (count - count / nodes) / (count - 1) if kind == "all_to_all" else nodes / count

    def _nodes(self, ranks: tuple[int, ...]) -> int:
        if ranks not in self._spread:
            self._spread[ranks] = len({(rank + self.shift) // self.cluster.ranks_per_node for rank in ranks})
        return self._spread[ranks]

    def _latency(self, ranks: tuple[int, ...]) -> float:
        return (self.cluster.between if self._nodes(ranks) > 1 else self.cluster.inside).latency

    def _rate(self, kind: str, size: float, ranks: tuple[int, ...]) -> float:
        """Return the bytes per second of one rank in a collective of `size` bytes.

        The ranks of a node send to other nodes by its adapters, in equal parts. Groups along the same axes use the
        node's other adapters at the same time."""
        cluster = self.cluster
        inside, leaving = cluster.inside, self.leaving(kind, ranks=ranks)
        own = rate_at(inside.collectives.get(kind, inside.bandwidth), size=size)
        if not leaving:
            return own
        curve: Curve = cluster.between.collectives.get(kind, cluster.between.bandwidth)
        share = min(1.0, cluster.adapters / cluster.ranks_per_node)
        rate = rate_at(curve, size=size * leaving) * share / leaving
        staying = 1 - leaving if kind == "all_to_all" else 1.0  # each link of a ring carries as much
        return min(own / staying, rate) if leaving < 1 else rate


class EntryTime(NamedTuple):
    """Start and stop of an entry of a tape, in seconds since the first segment began."""

    segment: TapeSegment
    entry: Entry
    start: float
    stop: float


def entry_times(segments: Iterable[TapeSegment], *, cost_model: CostModel, step: float = 0.0) -> Iterator[EntryTime]:
    """Yield the times of the entries of consecutive segments, except messages between stages.

    step: seconds of each of the `steps` before a segment, which the segments do not show. Replicas exchange messages
    both ways at once: a message is received when the rank has sent its own ones.

    Collectives along the same axes run one after the other on one stream; the rank computes until it waits for one. If
    the cluster cannot compute and communicate together (`overlap` is False), a wait follows each call. On a GPU the
    host runs ahead of the device."""
    cluster = cost_model.cluster
    launch, action, runs_ahead = cluster.device.launch, cluster.device.action, cluster.device.kind != "cpu"
    now = host = 0.0
    free: dict[tuple[str, ...], float] = defaultdict(float)
    ends: dict[int, float] = {}
    for segment in segments:
        now += step * segment.steps
        if segment.kind in COMPUTE:
            host = (host if runs_ahead else now) + action
            now = now if runs_ahead else host
        for entry in segment.entries:
            if isinstance(entry, TapeOperation):
                host = (host if runs_ahead else now) + launch
                start = max(now, host)
                now = start + cost_model.seconds(entry)
                yield EntryTime(segment, entry, start, now)
            elif isinstance(entry, TapeCall):
                if entry.record.point_to_point and segment.activity is not StepPhase.AGREE:
                    continue
                start = max(now, free[entry.record.axes])
                took = 0.0 if entry.record.kind == "recv" else cost_model.collective(entry)
                end = free[entry.record.axes] = ends[entry.record.sequence] = start + took
                yield EntryTime(segment, entry, start, end)
                if not cluster.overlap:
                    yield EntryTime(segment, TapeWait(entry.record.sequence), now, end)
                    now = end
            elif isinstance(entry, TapeWait):
                end = max(now, ends.get(entry.sequence, 0.0))
                yield EntryTime(segment, entry, now, end)
                now = end
            else:
                yield EntryTime(segment, entry, now, now)


def step_traffic(
    tiers: Offload, *, sizes: Mapping[str, int], updated: Mapping[str, int], microbatches: int, on_gpu: bool
) -> tuple[TierTraffic, TierTraffic]:
    """Return the bytes that a rank moves between tiers in a step: during all micro-batches, and at the update.

    | sizes     bytes of a rank off the device by kind of state; for activations, the bytes of one micro-batch
    | updated   bytes of `params` and `gradients` in the rank's update
    | on_gpu    True if the rank computes on a GPU, so its transfers cross the link to the host"""
    # Number of reads and writes by kind of state.
    times = {"activations": 2 * microbatches, "params": 2 * microbatches, "gradients": 2 * microbatches - 1}
    at_update = {"params": 1, "gradients": 1, "masters": 2, "optimizer": 2}
    along = sum(many * sizes.get(what, 0) for what, many in times.items())
    crossing = sum(size for what, size in updated.items() if (getattr(tiers, what) == "device") is tiers.updates_on_cpu)
    disk, disk_after = (
        sum(many * sizes.get(what, 0) for what, many in moves.items() if getattr(tiers, what) == "disk")
        for moves in (times, at_update)
    )
    return TierTraffic(along * on_gpu, disk), TierTraffic(crossing * on_gpu, disk_after)


def step_seconds(tape: Tape, *, took: float, cluster: Cluster, on_host: bool) -> float:
    """Return the seconds of a step with the traffic between tiers. `took`: its seconds without this traffic.

    Traffic of the micro-batches overlaps computation; traffic of the update follows it. `on_host`: the optimizer of a
    GPU runs on the host, at the rate of the host's memory."""
    updates = 0
    if on_host:
        operations = (entry for part in tape.steady for entry in part.entries if isinstance(entry, TapeOperation))
        updates = sum(one.bytes for one in operations if one.name.startswith("_fused_"))
    host, sharing = cluster.host, cluster.ranks_per_node  # a node's ranks share its disk, and have a link each
    moved = (tape.microbatch_traffic, tape.update_traffic)
    along, after = (max(one.link / host.link, one.disk * sharing / host.disk) for one in moved)
    return max(took, along) + max(after, updates * sharing / host.memory)
