"""Compute the bytes that offloaded state moves between device, host and disk in a step, and their seconds.

    | offloaded     in every micro-batch                  at the update, after the norm of all gradients is known
    | activations   written, read
    | parameters    read twice (gathers)                  written
    | gradients     written; read except in the first     read
    | masters                                             read, written
    | optimizer                                           read, written

Bytes between a GPU and its host cross the link between them. Bytes of the tier `disk` also use the disk. If optimizer
state is off the GPU, the host runs the update; gradients and parameters on the GPU then cross the link once."""

from collections.abc import Mapping
from types import MappingProxyType

from meshwise.plan.plan_keys import Offload
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.step_tape import Tape, TapeOperation, TierTraffic

_AT_UPDATE: Mapping[str, int] = MappingProxyType({"params": 1, "gradients": 1, "masters": 2, "optimizer": 2})
"""Number of reads and writes at the update, by kind of state."""


def microbatch_traffic(tiers: Offload, *, sizes: Mapping[str, int], microbatches: int, on_gpu: bool) -> TierTraffic:
    """Return the bytes that a rank moves between tiers during all micro-batches of a step.

    `sizes`: bytes of a rank off the device by kind of state; for activations, the bytes of one micro-batch.
    `on_gpu`: the rank computes on a GPU, so its transfers cross the link to the host."""
    times = {"activations": 2 * microbatches, "params": 2 * microbatches, "gradients": 2 * microbatches - 1}
    moved = {what: many * sizes.get(what, 0) for what, many in times.items()}
    on_disk = sum(size for what, size in moved.items() if getattr(tiers, what) == "disk")
    return TierTraffic(link=sum(moved.values()) if on_gpu else 0, disk=on_disk)


def update_traffic(
    tiers: Offload, *, sizes: Mapping[str, int], updated: Mapping[str, int], on_gpu: bool
) -> TierTraffic:
    """Return the bytes that a rank moves between tiers at the update.

    `sizes`, `on_gpu`: as in `microbatch_traffic`. `updated`: bytes of `params` and `gradients` in the rank's update."""
    crossing = (what for what in updated if (getattr(tiers, what) == "device") is tiers.updates_on_cpu)
    on_disk = (what for what in _AT_UPDATE if getattr(tiers, what) == "disk")
    return TierTraffic(
        link=sum(updated[what] for what in crossing) if on_gpu else 0,
        disk=sum(_AT_UPDATE[what] * sizes.get(what, 0) for what in on_disk),
    )


def step_seconds(tape: Tape, *, took: float, cluster: Cluster, on_host: bool) -> float:
    """Return the seconds of a step with the traffic between tiers. `took`: its seconds without this traffic.

    Traffic of the micro-batches overlaps computation; traffic of the update follows it. `on_host`: the optimizer of a
    GPU runs on the host, at the rate of the host's memory."""
    updates = 0
    if on_host:
        operations = (entry for part in tape.steady for entry in part.entries if isinstance(entry, TapeOperation))
        updates = sum(one.bytes for one in operations if one.name.startswith("_fused_"))
    along, after = (_seconds(traffic, cluster) for traffic in (tape.microbatch_traffic, tape.update_traffic))
    return max(took, along) + max(after, updates * cluster.ranks_per_node / cluster.host.memory)


def _seconds(traffic: TierTraffic, cluster: Cluster) -> float:
    """Return the seconds of traffic: the slower of the rank's link, and of the disk that a node's ranks share."""
    return max(traffic.link / cluster.host.link, traffic.disk * cluster.ranks_per_node / cluster.host.disk)
