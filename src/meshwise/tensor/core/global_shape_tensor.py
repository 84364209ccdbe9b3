"""A tensor that holds this rank's part and reports the global shape.

What a user's code is handed of the vocabulary, logits and the table's weight, is split over the ranks, and that code
was written for all of it. So it gets a tensor with the full shape, which says what each function makes of the part.
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
"""What tells of a tensor and computes nothing."""

OF_THE_PART = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version")),
        *(getattr(Tensor, name) for name in ("register_hook", "is_contiguous")),
    }
)
"""What is asked of the part."""


class GlobalShapeTensor(Tensor):
    """A tensor without memory of its own; `local` is this rank's part. `too_late` is said of {}, a function that torch
    calls below autograd.
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
        """Answer questions about shape and dtype for the whole tensor."""
        given = dict(kwargs or {})
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        return cls.answer(func, args=args, given=given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError: the local part cannot be substituted any more. Raises RuntimeError."""
        raise RuntimeError(cls.too_late.format(func))
