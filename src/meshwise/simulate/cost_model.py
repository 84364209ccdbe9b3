"""Compute the seconds that one operation, one allocation or one collective takes on a cluster."""

import math
from dataclasses import dataclass, field

from meshwise.simulate.cluster import Cluster, Curve, rate_at
from meshwise.simulate.step_tape import MemoryChange, TapeCall, TapeOperation

FUSED = frozenset(
    {
        "_fused_adamw_",
        "_fused_adam_",
        "_fused_sgd_",
        "_softmax",
        "_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_dropout",
        "native_dropout_backward",
    }
)
"""Operations that torch already runs as one kernel; `Device.fused` does not reduce their bytes."""

SEND_RECV = "send_recv"
"""Name of point-to-point messages in `Link.collectives`."""

RINGS = frozenset({"all_gather", "reduce_scatter"})
"""Collectives that always run as a ring of all ranks."""


@dataclass
class CostModel:
    """Seconds of operations and collectives on one cluster. It keeps the results for operations."""

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
            moved = operation.bytes * (1.0 if operation.name in FUSED else device.fused)
            return device.kernel + moved / rate_at(device.bandwidth, size=moved)
        one = operation.product
        attention = "attention" in operation.name
        curve = device.attention if attention else device.products
        inner, outputs = (one.n, one.batch * one.m) if attention else (one.k, one.batch * one.m * one.n)
        peak = device.peak_of(operation.dtype)
        computing = operation.flops * operation.part / (peak * curve.efficiency(inner=inner, outputs=outputs))
        return device.kernel + max(computing, operation.bytes / rate_at(device.bandwidth, size=operation.bytes))

    def allocation(self, memory: MemoryChange) -> float:
        """Return the seconds in which the system provides the pages of new memory, `fresh` times; 0 for old memory."""
        fresh = self.cluster.device.fresh
        return memory.fresh * memory.bytes / rate_at(fresh, size=memory.bytes) if memory.fresh else 0.0

    def collective(self, call: TapeCall) -> float:
        """Return the seconds of one collective or message. Other groups along its axes run the same call meanwhile."""
        kind = SEND_RECV if call.record.point_to_point else call.record.kind
        size, ranks = call.record.bytes, call.ranks
        count = len(ranks)
        if kind == "barrier":
            return self._latency(ranks) * math.ceil(math.log2(count))
        moved = size * sent_fraction(kind, count=count)
        steps = 1 if kind == SEND_RECV else math.ceil(math.log2(count))
        waited = self._latency(ranks) * steps
        if kind in RINGS and self.crosses_nodes(ranks):
            nodes, between, inside = self._nodes(ranks), self.cluster.between, self.cluster.inside
            waited = max(waited, (nodes - 1) * between.hop + (count - nodes) * inside.hop)  # all hops of the ring
        return waited + moved / self._rate(kind, size, ranks)

    def crosses_nodes(self, ranks: tuple[int, ...]) -> bool:
        """Return whether these ranks are in more than one node."""
        return self._nodes(ranks) > 1

    def mean_ranks_per_node(self, ranks: tuple[int, ...]) -> float:
        """Return how many of these ranks share a node, on average, at least 1."""
        return max(1.0, len(ranks) / self._nodes(ranks))

    def _nodes(self, ranks: tuple[int, ...]) -> int:
        if ranks not in self._spread:
            self._spread[ranks] = len({(rank + self.shift) // self.cluster.ranks_per_node for rank in ranks})
        return self._spread[ranks]

    def _latency(self, ranks: tuple[int, ...]) -> float:
        return (self.cluster.between if self.crosses_nodes(ranks) else self.cluster.inside).latency

    def _rate(self, kind: str, size: float, ranks: tuple[int, ...]) -> float:
        """Return the bytes per second of one rank in a collective of `size` bytes.

        In a ring over several nodes, each rank of a node uses its own adapter, and the adapters carry equal parts. The
        other groups along the same axes use the node's other adapters at the same time."""
        cluster = self.cluster
        inside = rate_at(cluster.inside.collectives.get(kind, cluster.inside.bandwidth), size=size)
        if not self.crosses_nodes(ranks):
            return inside
        curve: Curve = cluster.between.collectives.get(kind, cluster.between.bandwidth)
        here = self.mean_ranks_per_node(ranks)
        share = min(1.0, cluster.adapters / cluster.ranks_per_node)
        rate = rate_at(curve, size=size / here) * here * share
        return min(inside, rate) if here > 1 else rate


def sent_fraction(kind: str, *, count: int) -> float:
    """Return the bytes that each of `count` ranks sends in a collective, divided by the larger of input and output."""
    if kind in ("send", "recv", SEND_RECV):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (count - 1) / count
