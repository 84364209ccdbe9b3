"""Join the ranks of a test a second time: over shared memory, over borrowed memory, or with gloo."""

from __future__ import annotations

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from meshwise.comm.api.world import World
from meshwise.comm.network.job_store import job_store
from meshwise.comm.network.process_world import process_world
from meshwise.comm.shared_memory.group_queue import GroupQueues
from meshwise.comm.shared_memory.host_connection import HostConnection
from meshwise.comm.shared_memory.local_world import LocalWorld


def joined(world: World, name: str, how: str) -> World:
    """The same ranks over a world of their own, whose store is called `name`. Close it.

    how: "shared memory", "borrowed memory" (where no process may read another's own), or "gloo"."""
    found = job_store()
    assert found is not None
    store = PrefixStore(name, found)
    if how == "shared memory":
        return process_world(world.device, store=store, comm="local")
    if how == "borrowed memory":
        host = HostConnection.enter(store, rank=world.rank, ranks=range(world.size), memory=None)
        return LocalWorld(rank=world.rank, mesh=world.mesh, queues=GroupQueues(host))
    return process_world(world.device, store=store, comm="gloo")


def holds_together(world: World) -> bool:
    """Whether its ranks hold parameters together from `zero=1` on."""
    return isinstance(world, LocalWorld)
