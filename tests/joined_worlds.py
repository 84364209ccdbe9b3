"""Join the ranks of a test a second time: over shared memory, or with gloo."""

from __future__ import annotations

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from meshwise.comm.api.world import World
from meshwise.comm.network.choose_world import process_world
from meshwise.comm.network.job_store import job_store
from meshwise.comm.shared_memory.local_world import LocalWorld


def joined(world: World, name: str, how: str) -> World:
    """The same ranks over a world of their own, whose store is called `name`. Close it.

    how: "shared memory" or "gloo"."""
    found = job_store()
    assert found is not None
    store = PrefixStore(name, found)
    return process_world(world.device, store=store, comm="local" if how == "shared memory" else "gloo")


def holds_together(world: World) -> bool:
    """Whether its ranks hold parameters together from `zero=1` on."""
    return isinstance(world, LocalWorld)
