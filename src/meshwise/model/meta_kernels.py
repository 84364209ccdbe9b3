"""Meta kernels that torch lacks, and checks that its meta kernels omit: some accept inputs that every device
refuses.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.dispatch_modes import TorchDispatchMode, unseen

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv})

_LABELLED: Mapping[Any, int] = MappingProxyType(
    {aten.nll_loss_forward: 1, aten.nll_loss_backward: 2, aten.nll_loss2d_forward: 1}
)
"""Which of their arguments are labels."""


def computed(func: OpOverload, *, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on meta tensors. Raises what torch does."""
    if _is_doubtful(func, args):
        with unseen():  # torch says what it takes of tensors that have values
            func(*map_tensors(_smallest, args), **kwargs)
    return _computed(func, args, kwargs)


def _computed(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the same of what torch takes."""
    if _is_update(func):
        return None
    place = _LABELLED.get(func._overloadpacket)
    if place is not None and args[place].dtype == torch.uint8:  # has a kernel, but not without values
        with unseen():
            args = (*args[:place], args[place].long(), *args[place + 1 :])
    if func is aten._grouped_mm.default and args[0].dtype == args[1].dtype != torch.bfloat16:
        return _grouped(*args[:2], *args[2:3], **kwargs)
    if func is aten._to_dense.default and args[0].is_sparse:
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
    return func(*args, **kwargs)


class MetaKernels(TorchDispatchMode):
    """Inside, tensors without values have these kernels too. What no device takes is left for one to refuse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(one.is_meta for one in tensors((args, kwargs))):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return _computed(func, args, kwargs)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Return products of groups of the rows, the columns or the terms, of any dtype: torch knows bfloat16 alone
    here.
    """
    groups = (offs.shape[0],) if a.dim() == b.dim() == 2 and offs is not None else ()
    return a.new_empty((*(a.shape[:1] if a.dim() == b.dim() == 3 else groups), a.shape[-2], b.shape[-1]))


def _is_doubtful(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether torch may refuse these dtypes where there are values, and does not where there are none."""
    if func._overloadpacket in _PRODUCTS:
        return len({tensor.dtype for tensor in tensors(args)}) > 1
    place = _LABELLED.get(func._overloadpacket)
    return place is not None and args[place].dtype != torch.long


@cache
def _is_update(func: OpOverload) -> bool:
    """Return whether this is an optimizer's fused update, which changes values and nothing else."""
    schema = func._schema
    return schema.name.startswith("aten::_fused_") and schema.name.endswith("_") and not schema.returns


def _smallest(tensor: Tensor) -> Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu")
