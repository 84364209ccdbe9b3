"""A batch norm between the matrices of a pair, where ranks share the features out.

Its statistics are independent for each feature, so a rank computes those of its own features. The running statistics
are buffers, which every rank holds whole. A rank writes the part of its features; the other parts are gathered after
every forward that may have written, 2 numbers a feature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.tensor.core.scheme import Axes
from meshwise.tensor.core.split_context import BoundToRank


@dataclass(frozen=True)
class SplitStatistics(BoundToRank):
    """Running statistics of a batch norm, bound to this rank: the axes that split the features, and each rank's number
    of features.
    """

    world: World
    axes: Axes
    sizes: tuple[int, ...]

    @contextlib.contextmanager
    def narrowed(self, norm: nn.Module) -> Iterator[None]:
        """Narrow the running statistics to this rank's features within the block; afterwards they cover all features
        again.
        """
        whole = {name: kept for name, kept in norm._buffers.items() if kept is not None and kept.dim()}
        parts = {name: kept.split(self.sizes)[self.world.group(self.axes).index] for name, kept in whole.items()}
        norm._buffers.update(parts)
        try:
            yield
        finally:
            norm._buffers.update(whole)
        for name, kept in whole.items() if norm.training else ():
            self.world.all_gather(parts[name].clone(), into=list(kept.split(self.sizes)), axes=self.axes).wait()


class ShardedBatchNorm(nn.Module):
    """A batch norm of this rank's features; a base in front of the module's own class."""

    sharding: SplitStatistics

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Compute as the original class does, on this rank's part."""
        with self.sharding.narrowed(self):
            output: Tensor = super().forward(input)
        return output
