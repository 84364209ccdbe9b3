"""Base class of tensors that hold this rank's part but report the shape of the whole tensor.

Logits, and the weight of the vocabulary embedding, are split over the ranks. The user's code was written for whole
tensors, so it gets a tensor of the global shape. The tensor's class decides how a torch function uses the part."""

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

ANSWERED_BY_PART = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version")),
        *(getattr(Tensor, name) for name in ("register_hook", "is_contiguous")),
    }
)
"""Functions whose result for the global tensor is the result for this rank's part."""


class GlobalShapeTensor(Tensor):
    """Tensor of the global shape without memory; the method `answer` of a subclass defines its functions.

    | local      this rank's part
    | too_late   error message for a function that reaches the tensor below autograd; {} is the function"""

    local: Tensor
    too_late: str

    @classmethod
    def over(cls, local: Tensor, *, shape: Sequence[int]) -> Self:
        """Return a tensor of the global `shape` that holds `local` as this rank's part."""
        self: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        return self

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return the result of torch function `func`, called with `args` and keyword arguments `given`."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, own = tuple(self.shape), tuple(self.local.shape)
        return f"{type(self).__name__}({shape}, this rank has {own}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return shape, dtype or device of the global tensor if `func` asks for them, else the result of `answer`."""
        given = dict(kwargs or {})
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        return cls.answer(func, args=args, given=given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError, because below autograd no function can use the local part instead of this tensor."""
        raise RuntimeError(cls.too_late.format(func))
