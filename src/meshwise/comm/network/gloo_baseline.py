"""Call torch's own gloo collectives, with which benchmarks compare the collectives of this package."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.world import Work, World
from meshwise.comm.network.loopback_store import LOOPBACK
from meshwise.comm.network.process_world import job_store

Call: TypeAlias = Callable[[World, Tensor, Tensor], Sequence[Work | c10d.Work]]
"""Collective of (world, x, y), as the works to wait for: reads x and writes y, or works in place on one of them.

Both tensors have the full size: the size of the gathered tensor. A rank's part is its slice of x or y."""


def gloo_calls(world: World, *, size: int) -> Mapping[str, Call]:
    """Return torch's gloo collectives among the first `size` ranks, by name; an empty mapping on other ranks. Names:
    all_reduce, all_gather, reduce_scatter, broadcast. Every rank of the world calls this function, and all are on one
    host. Raises RuntimeError when gloo cannot connect the ranks."""
    store = job_store()
    if store is None or world.rank >= size:
        return {}
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    group: Any = c10d.ProcessGroupGloo(store, world.rank, size, options)  # torch's stubs know none of its collectives

    def part(x: Tensor) -> Tensor:
        return x.view(size, -1)[world.rank]

    calls: dict[str, Call] = {
        "all_reduce": lambda _, x, __: [group.allreduce([x])],
        "all_gather": lambda _, __, y: [group._allgather_base(y, part(y))],  # in place, which saves gloo a copy
        "reduce_scatter": lambda _, x, y: [group._reduce_scatter_base(part(y), x)],
        "broadcast": lambda _, x, __: [group.broadcast(x, root=0)],
    }
    return MappingProxyType(calls)
