"""Run operations on meta tensors, including those for which torch's meta kernel is missing or too limited."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwise.base.tensor_tree import tensors
from meshwise.model.torch_private import TorchDispatchMode, without_modes

aten = torch.ops.aten

_LABELS: Mapping[Any, int] = MappingProxyType({aten.nll_loss_forward: 1, aten.nll_loss_backward: 2})
"""Operations with class labels, and the position of the labels among their arguments."""


def run_on_meta(func: OpOverload, *, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on meta tensors; None for an optimizer's fused update."""
    if _is_update(func):
        return None
    place = _LABELS.get(func._overloadpacket)
    if place is not None and args[place].dtype == torch.uint8:  # devices accept bytes, torch's meta kernel does not
        with without_modes():
            args = (*args[:place], args[place].long(), *args[place + 1 :])
    if func is aten._grouped_mm.default and args[0].dtype == args[1].dtype != torch.bfloat16:
        return _grouped(*args[:2], *args[2:3], **kwargs)
    if func is aten._to_dense.default and args[0].is_sparse:
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
    return func(*args, **kwargs)


class MetaKernels(TorchDispatchMode):
    """Mode that runs operations on meta tensors by `run_on_meta`, and all others as usual."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(one.is_meta for one in tensors((args, kwargs))):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return run_on_meta(func, args=args, kwargs=kwargs)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Return the meta result of a grouped matrix product; torch's own meta kernel accepts only bfloat16."""
    groups = (offs.shape[0],) if a.dim() == b.dim() == 2 and offs is not None else ()
    return a.new_empty((*(a.shape[:1] if a.dim() == b.dim() == 3 else groups), a.shape[-2], b.shape[-1]))


@cache
def _is_update(func: OpOverload) -> bool:
    """Return whether an operation is an optimizer's fused update, which changes values and returns nothing."""
    schema = func._schema
    return schema.name.startswith("aten::_fused_") and schema.name.endswith("_") and not schema.returns
