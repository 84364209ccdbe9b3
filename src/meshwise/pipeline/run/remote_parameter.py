"""Replace another stage's parameter by a tensor that has a shape and a dtype, but raises an error in computations.

A meta tensor is not enough: torch multiplies a CPU tensor by a meta tensor without an error, and returns arbitrary
memory. TorchScript and `torch.tensor` ignore subclasses of Tensor, so they still return arbitrary memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.pipeline.run.stage import StageError

REMEDY = (
    "Give it a second name in the module that reads it, as in self.shared = other.weight in its __init__, and read "
    "that: then each stage has it; or cut by hand so that both are on one stage: Options(cut=CutOptions(at=…)), "
    "model.cut_at of a job"
)
"""Advice at the end of an error about a stage that needs a parameter of another stage."""

_CASTS = frozenset((Tensor.to, Tensor.type_as))
"""Functions that convert their first tensor to the dtype of their second tensor."""
_LIKE = frozenset((*_CASTS, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.is_same_size))
"""Functions that read the shape or dtype of their second tensor; their result is on the device of the first."""

_SHAPED = frozenset(
    (
        *(Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros),
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like, torch.rand_like, torch.randn_like),
    )
)
"""Functions that make a new tensor in another tensor's shape or dtype; with a given `device`, it has real values."""


class RemoteParameter(Tensor):
    """Parameter or buffer of another stage; it has a shape and a dtype. Computing with it raises StageError."""

    known_as: str
    """Name of the parameter or buffer in the model."""

    @staticmethod
    def named(name: str, *, like: Tensor) -> "RemoteParameter":
        """Return a remote parameter with this name in the model, in the shape and dtype of `like`."""
        one = like.detach().as_subclass(RemoteParameter)
        one.known_as = name
        return one

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a remote result for remote parameters alone. Raises StageError for computations with other tensors."""
        known = kwargs or {}
        given = list(tensors((args, known)))
        where = next(tensor.__dict__["known_as"] for tensor in given if isinstance(tensor, RemoteParameter))
        asked = func in _LIKE and not isinstance(args[0], RemoteParameter)
        if not asked and any(not isinstance(tensor, RemoteParameter) for tensor in given):
            raise StageError(
                f"a stage computes with {where}, which another stage holds; on the example it did not need {where}. If "
                "the script calls trainer.model itself, as generate does, call trainer.predict: with pp a rank has one "
                f"stage. Else: {REMEDY}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if asked and func in _CASTS:
                return args[0].to(next(tensor.dtype for tensor in given if isinstance(tensor, RemoteParameter)))
            found = func(*args, **known)
            if asked or (func in _SHAPED and "device" in known):
                return found
            return map_tensors(lambda tensor: RemoteParameter.named(where, like=tensor), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteParameter":
        return self
