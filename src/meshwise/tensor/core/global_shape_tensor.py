"""A tensor that holds this rank's part and reports the global shape.

Logits and the weight of the vocabulary's table are split over the ranks, and a user's code was written for all of them.
So it gets a tensor with the full shape, which decides what each function computes from the part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

_ABOUT = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda")
        ),
        *(
            getattr(Tensor, name)
            for name in ("size", "dim", "numel", "nelement", "element_size", "__len__", "ndimension")
        ),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "get_device")),
    }
)
"""Functions that return shape, dtype or device, and compute nothing."""

OF_THE_PART = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version")),
        *(getattr(Tensor, name) for name in ("register_hook", "is_contiguous")),
    }
)
"""Functions that are answered by the part."""


class GlobalShapeTensor(Tensor):
    """A tensor without memory of its own; `local` is this rank's part. `too_late` is the error for a function, {}, that
    torch calls below autograd.
    """

    local: Tensor
    too_late: str

    @classmethod
    def over(cls, local: Tensor, *, shape: Sequence[int]) -> Self:
        """Return a tensor of this shape whose local part is `local`."""
        self: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        return self

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return the result of a torch function on it."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, own = tuple(self.shape), tuple(self.local.shape)
        return f"{type(self).__name__}({shape}, this rank has {own}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return shape, dtype and device of the whole tensor, and `answer` for any other function."""
        given = dict(kwargs or {})
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        return cls.answer(func, args=args, given=given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError: below autograd the local part cannot take the tensor's place."""
        raise RuntimeError(cls.too_late.format(func))
