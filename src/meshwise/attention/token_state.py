"""Tokens of the present micro-batch: which rank has which, and the batch cut to this rank's tokens.

The token dim is dim 1 of a batch's first tensor: integers (samples, tokens) or floats (samples, tokens, features).
Every tensor with as many elements along dim 1 is cut, except a mask (samples, tokens, tokens), which stays whole."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshwise.attention.mask_pattern import Documents, Pattern
from meshwise.base.mesh import even_split
from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.layout.layout import TokenRanges, token_order

RING, HEADS = "ring", "heads"
"""Axes into which the axis `cp` is divided: `heads` exchanges tokens for heads, `ring` exchanges keys."""


@dataclass(eq=False)
class TokenState:
    """Tokens of one micro-batch.

    | length     tokens of a whole sequence
    | order      positions of the tokens of each rank along (ring, heads)
    | index      index of this rank in `order`
    | whole_of   by id of a cut tensor of the batch: the cut and the whole tensor"""

    world: World
    length: int
    order: tuple[TokenRanges, ...]
    index: int
    names: Mapping[torch.nn.Module, str] = field(default_factory=dict)
    """Names of the model's modules, for messages."""
    batch: Any = None
    """The batch as the engine gave it."""
    cut: Any = None
    """The batch with this rank's tokens."""
    whole_of: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By id of a tensor with this rank's tokens in its last dim: the tensor, and the tensor of all tokens."""
    reads_packing: bool = False
    """True if the model looks for documents in position_ids (transformers without a cache or a mask)."""
    shares: dict[Pattern, float] = field(default_factory=dict)
    """Share of other ranks' keys that a rank needs, by pattern."""

    @property
    def own(self) -> TokenRanges:
        """Positions of this rank's tokens."""
        return self.order[self.index]

    def take_batch(self, batch: Any) -> None:
        """Cut the batch to this rank's tokens."""

        def take(x: Tensor) -> Tensor:
            if x.dim() < 2 or x.size(1) != self.length:
                return x
            if x.dim() > 2 and x.size(2) == self.length and (x.dim() == 3 or not x.is_floating_point()):  # a mask
                return x
            own = self.own.take(x, dim=1).contiguous()
            self.whole_of[id(own)] = (own, x)
            return own

        self.batch, self.cut = batch, map_tensors(take, batch)

    @cached_property
    def packed(self) -> Pattern | None:
        """Documents of the batch, as `packed_documents` returns them."""
        return packed_documents(self.batch)

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """Return a tensor with all tokens along `dim`, in the order of their positions (collective); see `gathered`."""
        known = self.gathered.get(id(x))
        if known is not None:
            return known[1]
        source = x.to(torch.uint8) if x.dtype == torch.bool else x
        sizes = [one.count for one in self.order]
        parts = gradient.all_gather(source, world=self.world, axes=(RING, HEADS), dim=dim, sizes=sizes).wait()
        whole = parts.index_select(dim, TokenRanges.joined(self.order).positions(device=x.device).argsort())
        whole = whole.bool() if x.dtype == torch.bool else whole
        if not x.requires_grad:
            self.gathered[id(x)] = (x, whole)
        return whole


def packed_documents(batch: Any) -> Pattern | None:
    """Return documents that begin where the batch's `position_ids` do not count on by 1; None if there are none."""
    given = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(given, Tensor) or given.dim() != 2 or given.is_meta:
        return None
    begins = given.diff(dim=1, prepend=given[:, :1] - 1) != 1
    return Documents(begins.cumsum(1)) if bool(begins.any()) else None


def sequence_length(batch: Any) -> int:
    """Return the number of tokens of a batch. Raises ValueError when its first tensor has no token dim."""
    first = next(tensors(batch), None)
    shape = () if first is None else tuple(first.shape)
    if first is None or first.dim() not in (2, 3) or (first.dim() == 3 and not first.is_floating_point()):
        raise ValueError(
            f"cp splits tokens, and the first tensor of the batch, of shape {shape}, is neither (samples, tokens) nor "
            "(samples, tokens, features). Put the tokens first in the batch, or use cp=1"
        )
    return shape[1]


def rank_order(order: str, *, length: int, ring: int, heads: int) -> tuple[TokenRanges, ...]:
    """Return the positions of each rank along (ring, heads): `order` over the ring, neighbours over `heads`."""
    found: list[TokenRanges] = []
    for group in token_order(order, length=length, parts=ring):
        found += [group.narrow(start, stop=stop) for start, stop in even_split(group.count, heads)]
    return tuple(found)


def token_dims(x: Tensor, *, count: int) -> Iterable[int]:
    """Return the dims of an activation that may count this rank's tokens.

    | (samples, tokens)                     integers and flags
    | (samples, tokens, features)           dim 1
    | (samples, tokens, heads, features)    or (samples, heads, tokens, features): dims 1 and 2"""
    dims = x.dim()
    if dims < 2 or isinstance(x, torch.nn.Parameter):
        return ()
    if dims == 2:
        return (1,) if x.shape[1] == count and not x.is_floating_point() else ()
    return tuple(dim for dim in range(1, min(dims, 4) - 1) if x.shape[dim] == count)
