"""Interface of the object that stores a model's parameters on a rank (`Engine`)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import Options
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.memory.tiers import Tiers
from meshwise.model.parameter_table import ParameterTable


class Engine(Protocol):
    """A rank's parameters, gradients and their collectives: a `DataParallel`, or a `StagedEngine` with stages."""

    world: World
    table: ParameterTable
    tiers: Tiers

    @property
    def module(self) -> nn.Module:
        """Module that this rank runs; a ModuleList if it runs several stages."""

    @property
    def units(self) -> Sequence[LiveUnit]:
        """Units on this rank, in table order; the parameters of a unit are gathered and reduced together."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets with trainable parameters, in table order."""

    @property
    def tied(self) -> frozenset[str]:
        """Names of the parameters that several pipeline stages hold."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """List of the modules of this rank's stages; without stages, only the module."""

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """Return the flat slices that an optimizer updates on this rank, by options. All ranks have the same keys."""

    def check_parameters(self) -> None:
        """Raise ValueError if a parameter's `requires_grad`, dtype or tensor was changed since `parallelize`."""

    def squared_norm(self) -> Tensor:
        """Return this rank's part of the reduced gradient's squared norm, an fp64 scalar; callers add up the parts."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients that this rank owns by `factor`."""

    def publish(self) -> None:
        """Round this rank's masters to parameters, and send the parameters to the other ranks (collectives)."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) in table order, on every rank (collectives); each is valid until the next one."""

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full reduced gradient) of each trainable parameter, on every rank (collectives)."""

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of each buffer, on every rank."""

    def saves(self, buffer: str) -> bool:
        """Return whether this rank saves `buffer` in a checkpoint; exactly one rank does."""

    def memory(self) -> dict[str, int]:
        """Return bytes on this rank: `parameters`, `gradients`, `reduction`, `gathered_peak`; see `DataParallel`."""

    def close(self) -> None:
        """Remove the hooks from the model."""
