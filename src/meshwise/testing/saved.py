"""`SavedForBackward`: the memory that activations take, by autograd's own account.

Peak memory of a process mixes activations with parameters, buffers and whatever the allocator keeps. What a forward
leaves for its backward is exact, the same on every machine, and what a scheme says it divides.
"""

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedForBackward:
    """Counts, inside a `with` block, the memory of what autograd saves, parameters of `model` aside.

    `bytes` is the sum over distinct memory, each counted once, as large as it was allocated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
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
