"""Gradient reduction: which tensors a rank keeps in full or as a shard, and which collectives sum the gradients.

The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5) are four reductions:

    | zero   kept parameters   kept gradients   updated by a rank   collectives
    | 0      full              full             all                 all-reduce once a step
    | 1      full              full             its shard           reduce-scatter and all-gather once a step
    | 2      full              shard            its shard           reduce-scatter per micro-batch, all-gather per step
    | 3      shard             shard            its shard           reduce-scatter per micro-batch, all-gathers per pass

A reduction may keep state between steps, such as a compression error or the momentum of an outer optimizer: one
tensor per logical parameter. The state counts as memory, is saved, and is resharded when a checkpoint is loaded."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from meshwise.comm.api.world import Axes, Work, World
from meshwise.data_parallel.bucket_place import BucketPlace


@dataclass(frozen=True)
class Reduction:
    """Kind of gradient reduction: which tensors a rank keeps as shards. The collectives of a step follow from this."""

    shards_updates: bool = False
    """Each rank updates only its shard of the parameters."""
    shards_gradients: bool = False
    """Reduced gradients are kept as shards, so they are reduced after each micro-batch, not once a step."""
    shards_parameters: bool = False
    """Parameters are kept as shards, gathered before a unit runs and freed when the next unit runs."""
    owned_state: tuple[str, ...] = ()
    """Names of state tensors for the elements that this rank updates, in the dtype of the masters."""
    summed_state: tuple[str, ...] = ()
    """Names of state tensors that every rank keeps for all elements, in the dtype of accumulated gradients. Ranks have
    different values, whose sum is the logical tensor."""
    owner_state: tuple[str, ...] = ()
    """Names of `summed_state` to which each rank adds a further tensor for its shard, `NAME/owner` in the state."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all state that is saved."""
        return (*self.owned_state, *self.summed_state)

    def start(self, gradients: Tensor, *, into: Tensor | None, peers: "ReducingRanks") -> "ReducedPart":
        """Start to sum `gradients`, (elements,) in the wire dtype, over the ranks. It may overwrite `gradients`.

        The result is the elementwise sum: if `shards_updates`, only this rank's shard, else all elements. `into`
        receives the shard, (elements of the shard,). None: the result stays in `gradients`."""
        world, axes, shard = peers.world, peers.axes, peers.shard
        if not self.shards_updates:
            return ReducedPart(world.all_reduce(gradients, axes=axes), gradients)
        target = gradients[shard] if into is None else into
        return ReducedPart(world.reduce_scatter(gradients, into=target, axes=axes), target)


@dataclass(frozen=True)
class ReducingRanks:
    """Ranks of one reduction, with the shard and the state of this rank.

    | world, axes   the ranks whose gradients are summed
    | shard         elements of the bucket that are this rank's shard
    | state         the tensors of `owned_state`, `summed_state` and `owner_state`, by name; `start` may write to them.
    |               It may add others, which are not saved
    | place         places of the parameters in the bucket"""

    world: World
    axes: Axes
    shard: slice
    state: MutableMapping[str, Tensor]
    place: BucketPlace

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.group(self.axes).size

    def clear_padding(self, values: Tensor, *, start: int) -> Tensor:
        """Zero the padding in `values`, the elements of the bucket from `start` on; return `values`."""
        for low, high in self.place.padding:
            values[max(low - start, 0) : max(high - start, 0)].zero_()
        return values


@dataclass(frozen=True)
class ReducedPart:
    """A reduction that has started: `values` hold the sum once `work` is done."""

    work: Work
    values: Tensor


ZERO: Mapping[int, Reduction] = MappingProxyType(
    {
        0: Reduction(),
        1: Reduction(shards_updates=True),
        2: Reduction(shards_updates=True, shards_gradients=True),
        3: Reduction(shards_updates=True, shards_gradients=True, shards_parameters=True),
    }
)
"""The reduction of each stage of ZeRO, by its number."""
