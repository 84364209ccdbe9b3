"""How ranks that share parameters bring their gradients together, as values.

A reduction says what a rank keeps whole and what as its shard, what travels and when. The stages of ZeRO (Rajbhandari
et al., arXiv 1910.02054, section 5) are four of them:

    | zero   parameters (used)   gradients   updated by the optimizer   traffic of a step
    | 0      whole               whole       everything                 all-reduce(gradients)
    | 1      whole               whole       shard                      reduce-scatter + all-gather
    | 2      whole               shard       shard                      the same, a reduce a micro-batch
    | 3      shard               shard       shard                      + one all-gather more

A reduction that remembers something from step to step (the error of a codec, an outer momentum) names it as state: a
tensor per logical parameter, which counts as memory, is saved, and is resharded with a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from meshwise.comm.api.world import Axes, Work, World


@dataclass(frozen=True)
class Reduction:
    """What each rank keeps a shard of, and with it what the ranks send one another."""

    shards_updates: bool = False
    """Each rank updates its shard of the parameters, not all of them."""
    shards_gradients: bool = False
    """Reduced gradients are kept as shards; so they are reduced after each micro-batch, not once a step."""
    shards_parameters: bool = False
    """Parameters are whole only while they are used: gathered before, freed after."""
    owned_state: tuple[str, ...] = ()
    """Names of state kept for the elements that this rank updates, in the dtype of the masters."""
    summed_state: tuple[str, ...] = ()
    """Names of state that every rank keeps for all elements, in the dtype that gradients accumulate in. It differs from
    rank to rank; the sum over the ranks is the logical tensor."""

    @property
    def each_microbatch(self) -> bool:
        """True if gradients are reduced after each micro-batch, False for once a step."""
        return self.shards_gradients

    @property
    def publishes(self) -> bool:
        """True if ranks bring updated shards to one another at the end of a step."""
        return self.shards_updates and not self.shards_parameters

    def send(self, gradients: Tensor, *, into: Tensor | None, peers: "ReducingRanks") -> "ReducedPart":
        """Start to sum the gradients of all ranks, (elements,) in the dtype that they travel in.

        into: where the sum of this rank's shard goes, (elements of the shard,); by default it replaces them in
        `gradients`. Whether the sum is of all elements or of the shard, `shards_updates` says.
        """
        world, axes, shard = peers.world, peers.axes, peers.shard
        if not self.shards_updates:
            return ReducedPart(world.all_reduce(gradients, axes=axes), gradients)
        target = gradients[shard] if into is None else into
        return ReducedPart(world.reduce_scatter(gradients, into=target, axes=axes), target)


@dataclass(frozen=True)
class ReducingRanks:
    """Ranks of one reduction, and what this rank keeps for it.

    | world, axes   the ranks whose gradients are summed
    | shard         this rank's elements
    | state         the tensors that `owned_state` and `summed_state` name, by name; to be written to
    """

    world: World
    axes: Axes
    shard: slice
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReducedPart:
    """A reduction under way: `values` hold the sum once `work` is done."""

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
"""The reduction of each stage of ZeRO."""
