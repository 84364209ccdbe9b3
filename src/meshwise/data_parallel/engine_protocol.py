"""Interface of an object that stores a model's parameters on a rank."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import Options
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.memory.tiers import Tiers
from meshwise.model.parameter_table import ParameterRow, ParameterTable


class Engine(Protocol):
    """Storage of a model on a rank: a `DataParallel`, or one for each stage. The part `engine/` runs steps with it."""

    world: World
    table: ParameterTable
    tiers: Tiers

    @property
    def module(self) -> nn.Module:
        """Module that this rank runs."""

    @property
    def units(self) -> Sequence[LiveUnit]:
        """Units: parameters gathered and reduced together."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets that have gradients."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Return the module, or the modules of the stages."""

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """Return the slices that an optimizer updates on this rank, by options, in the same order on every rank."""

    def check_parameters(self) -> None:
        """Raise ValueError when a parameter of the model is not what it was when the plan was applied."""

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the summed gradient, fp64."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the owned gradients."""

    def publish(self) -> None:
        """Round this rank's masters to parameters, and send these to the ranks that use them."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) in table order, on every rank; the tensor is valid until the next one is asked for."""

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full reduced gradient) of the trainable parameters in table order, on every rank."""

    def whole(self, owned: Callable[[Bucket], Tensor]) -> Iterator[tuple[ParameterRow, Tensor]]:
        """Yield a value of each trainable parameter on this rank as a full tensor, in table order (collectives).

        owned: the values of the elements of a bucket that this rank updates, (elements,).
        """

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of the buffers, on every rank."""

    def saves(self, buffer: str) -> bool:
        """Return whether this rank is the one that saves a buffer."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of parameters and gradients on this rank, and the peak bytes of gathered parameters."""

    def close(self) -> None:
        """Remove the hooks from the model."""
