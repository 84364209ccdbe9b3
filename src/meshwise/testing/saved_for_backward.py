"""Measure the memory of activations: the bytes that autograd saves in a forward.

Peak memory of a process mixes activations with parameters, buffers and whatever the allocator keeps. The saved bytes
are exact, the same on every machine, and the number that formulas of schemes give.
"""

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedForBackward:
    """Context that counts the storages that autograd saves in it, except the parameters of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes saved so far: the sizes of all distinct storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._parameters:
            self._kept.setdefault(place, tensor)
        return tensor
