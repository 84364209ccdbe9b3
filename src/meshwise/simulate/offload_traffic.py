"""Compute the traffic between tiers in a step, and how long it takes.

    | what rests    by every micro-batch                  at the update, which waits for all gradients' norm
    | activations   written, read
    | parameters    read twice (gathers)                  written
    | gradients     written; of all but the first, read   read
    | masters                                             read, written
    | optimizer                                           read, written

What a GPU and its host exchange crosses the link between them; what rests on the disk is read and written there. Where
the optimizer's state leaves a GPU, the host updates: gradients and parameters cross the link once, wherever they rest.
"""

from collections.abc import Mapping
from types import MappingProxyType

from meshwise.plan.plan_keys import Offload
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.step_tape import Tape, TapeOperation, TierTraffic

_AT_UPDATE: Mapping[str, int] = MappingProxyType({"params": 1, "gradients": 1, "masters": 2, "optimizer": 2})
"""Times that each is read or written at the update."""


def microbatch_traffic(tiers: Offload, *, sizes: Mapping[str, int], microbatches: int, on_gpu: bool) -> TierTraffic:
    """Return the traffic during the micro-batches.

    `sizes`: bytes on other tiers; for activations, the bytes of one micro-batch.
    """
    times = {"activations": 2 * microbatches, "params": 2 * microbatches, "gradients": 2 * microbatches - 1}
    moved = {what: many * sizes.get(what, 0) for what, many in times.items()}
    on_disk = sum(size for what, size in moved.items() if getattr(tiers, what) == "disk")
    return TierTraffic(link=sum(moved.values()) if on_gpu else 0, disk=on_disk)


def update_traffic(
    tiers: Offload, *, sizes: Mapping[str, int], updated: Mapping[str, int], on_gpu: bool
) -> TierTraffic:
    """Return the traffic at the update.

    `updated`: bytes of the `params` that a rank updates, and of their `gradients`.
    """
    crossing = (what for what in updated if (getattr(tiers, what) == "device") is tiers.updates_on_cpu)
    on_disk = (what for what in _AT_UPDATE if getattr(tiers, what) == "disk")
    return TierTraffic(
        link=sum(updated[what] for what in crossing) if on_gpu else 0,
        disk=sum(_AT_UPDATE[what] * sizes.get(what, 0) for what in on_disk),
    )


def step_seconds(tape: Tape, *, took: float, cluster: Cluster, on_host: bool) -> float:
    """Return the seconds of a step that takes `took` seconds on its device, with the traffic between tiers.

    `on_host`: a GPU's optimizer runs on the host.
    """
    updates = 0
    if on_host:
        operations = (entry for part in tape.steady for entry in part.entries if isinstance(entry, TapeOperation))
        updates = sum(one.bytes for one in operations if one.name.startswith("_fused_"))
    along, after = (_seconds(traffic, cluster) for traffic in (tape.microbatch_traffic, tape.update_traffic))
    return max(took, along) + max(after, updates * cluster.ranks_per_node / cluster.host.memory)


def _seconds(traffic: TierTraffic, cluster: Cluster) -> float:
    """Return the seconds of traffic over the link and to and from the disk, which the ranks of a node share."""
    return max(traffic.link / cluster.host.link, traffic.disk * cluster.ranks_per_node / cluster.host.disk)
