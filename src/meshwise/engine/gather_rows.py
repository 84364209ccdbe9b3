"""Gather the rows of all ranks, with gradients: for losses that compare the samples of a batch (contrastive losses)."""

import torch
from torch import Tensor

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World


def gather_rows(x: Tensor, *, world: World, axes: tuple[str, ...], counts: bool) -> tuple[Tensor, int]:
    """Return the rows of `x` of all ranks, in the order of the global batch, and the index of this rank's first row.

    Each rank compares its own rows with all of them. So the backward sums the gradients of all ranks, and returns this
    rank's part. Every rank along `axes` calls it.

    | x        (rows, …); the numbers of rows may differ, the other dims are equal
    | axes     mesh axes whose ranks have different rows
    | counts   False: the rows of this rank are spare ones; no rank gets them, and the returned index is 0"""
    group = world.group(axes)
    own = x if counts else x[:0]
    if group.size == 1:
        return own, 0
    sizes = torch.zeros(group.size, dtype=torch.int64, device=world.device)
    sizes[group.index] = len(own)
    world.all_reduce(sizes, axes=axes).wait()
    rows = sizes.tolist()
    start = sum(rows[: group.index]) if counts else 0
    return gradient.all_gather(own, world=world, axes=axes, sizes=rows).wait(), start
