"""Check that no collective of a rank waits for a call that another rank has not made yet."""

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World

MESH = Mesh.of(dp=2, tp=2)
LENGTHS = [9_000 * (at % 2) + 5 for at in range(70)]


def values(rank: int, at: int) -> Tensor:
    return torch.arange(LENGTHS[at]) % 7 + float(10 * rank + at)


def no_call_waits_for_one_that_another_rank_has_yet_to_make(world: World) -> None:
    """Many messages to the next rank before any is received, and many sums in another order of their groups."""
    view = world.over(MESH)
    axes = ("dp", "tp") if view.group("dp").index == view.group("tp").index else ("tp", "dp")
    sums = {axis: [values(world.rank, at) for at in range(len(LENGTHS))] for axis in axes}
    works = [view.all_reduce(x, axes=axis) for axis in axes for x in sums[axis]]
    ring = world.over(Mesh.of(ring=4))
    after, before = (world.rank + 1) % 4, (world.rank - 1) % 4
    works += [ring.send(values(world.rank, at), axis="ring", to=after) for at in range(len(LENGTHS))]
    world.barrier()
    received = [torch.zeros(length) for length in LENGTHS]
    works += [ring.recv(x, axis="ring", source=before) for x in received]
    for work in reversed(works):
        work.wait()
    for at, x in enumerate(received):
        assert torch.equal(x, values(before, at))
        for axis in axes:
            parts = [values(rank, at) for rank in view.group(axis).ranks]
            assert torch.equal(sums[axis][at], torch.stack(parts).sum(0))
