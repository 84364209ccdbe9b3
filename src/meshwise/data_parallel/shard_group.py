"""Storage of parameters over the ranks that share them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwise.comm.api.world import World
from meshwise.memory.tiers import Tiers
from meshwise.plan.degrees import REPLICAS
from meshwise.precision.dtype_policy import Precision


@dataclass(frozen=True)
class StorageConfig:
    """Storage configuration of a plan: zero stage, tiers, dtypes, and the axes whose ranks hold replicas."""

    zero: int = 0
    precision: Precision = dataclasses.field(default_factory=Precision)
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    replicas: tuple[str, ...] = REPLICAS


@dataclass(frozen=True)
class ShardGroup:
    """Ranks that share parameters, and how they store them."""

    world: World
    axes: tuple[str, ...]
    keeping: StorageConfig

    @property
    def zero(self) -> int:
        """The ZeRO stage."""
        return self.keeping.zero

    @property
    def precision(self) -> Precision:
        """The dtypes."""
        return self.keeping.precision

    @property
    def tiers(self) -> Tiers:
        """Tiers in which tensors rest between their uses."""
        return self.keeping.tiers

    @property
    def size(self) -> int:
        """Number of ranks that share the parameters."""
        return self.world.group(self.axes).size

    @property
    def index(self) -> int:
        """Which of the equal shards is this rank's."""
        return self.world.group(self.axes).index
