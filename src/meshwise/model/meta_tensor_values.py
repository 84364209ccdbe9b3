"""Compute the values of meta tensors that a forward derives from sizes, and from the integers of its batch.

A rehearsal's tensors have no values, so a model that reads values could not be rehearsed:

    positions = torch.arange(x.size(1), device=x.device)
    if (positions.diff() != 1).any(): ...                # are several texts in one row?
    if mask.all(): ...                                   # is nothing padded?

`positions` is made from no other tensor. The values of such small tensors are computed along with their meta tensors.
The second condition depends on integers of the batch, which have the user's values (`simulate/rehearsal.py`). Tensors
from parameters, draws or other numbers have no values.

`run_on_meta` serves operations whose meta kernel in torch is missing or too limited."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.torch_private import LightDispatchMode, in_backward, without_dispatch_modes, written_arguments

aten = torch.ops.aten

LARGEST = 2**22
"""Largest number of elements of a tensor whose values are computed."""

_CPU = torch.device("cpu")

_MASKS = (torch.bool, torch.uint8)

_MADE = frozenset(
    {aten.arange, aten.linspace, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor, aten.tril_indices}
)
"""Operations that make a tensor from numbers alone."""

_NEW = frozenset({aten.new_zeros, aten.new_ones, aten.new_full})
"""Operations that read only the dtype of a tensor argument."""

_LIKE = _NEW | {aten.zeros_like, aten.ones_like, aten.full_like}
"""Operations that read only the dtype or the sizes of a tensor argument."""


class ShapeConstants(LightDispatchMode):
    """Mode that gives the model the known values of meta tensors, in all steps of one rank's rehearsal.

    The values of the batch's integers are known, and the values of tensors made from known tensors. Inside `forward`
    and in a backward, values of tensors made without other tensors are known too."""

    def __init__(self, given: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """`given`: meta tensors of a batch, and their values."""
        super().__init__()
        self._forwards = 0
        self._values = WeakTensorKeyDictionary()
        self._places: set[int] = set()
        self._drawn = WeakTensorKeyDictionary()
        with without_dispatch_modes():
            for bare, values in given:
                self._note(bare, values.clone())  # a clone, because the model may write to them

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Mark that a model or a loss runs inside the block: values of tensors made from sizes alone are known."""
        self._forwards += 1
        try:
            yield
        finally:
            self._forwards -= 1

    def forget(self, bare: Iterable[Tensor]) -> None:
        """Forget the values of the meta tensors `bare`."""
        for one in bare:
            self._values.pop(one, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors(args), *tensors(kwargs)]
        with torch._C.DisableTorchFunction():
            drawn = self._is_drawn(func, given)
            known = not drawn and self._is_known(func, given)
            if known and kwargs.get("device") == _CPU and any(one.is_meta for one in given):
                return self._on_values(func, args, kwargs)
            if known and _is_answer(func, args) and any(one.is_meta for one in given):
                return map_tensors(self._keep, self._on_values(func, args, kwargs))
            packet = func._overloadpacket
            if not known and packet is aten.index:
                args = (args[0], self._by_number(args[1]))
            output = func(*args, **kwargs)
            if drawn:
                for one in tensors(output):
                    if not one.is_meta:
                        self._drawn[one] = True
            if func._schema.is_mutable:
                self._changed(func, args, kwargs, known=known)
            elif known and _is_small(output) and (self._is_made_by_model(output) or (given and packet not in _LIKE)):
                with contextlib.suppress(RuntimeError):  # a CPU does not compute everything
                    values_made = list(tensors(self._on_values(func, args, kwargs)))
                    for one, values in zip(tensors(output), values_made, strict=True):
                        self._note(one, values)
        return output

    def _is_drawn(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        """Return whether the result of an operation depends on a generator."""
        if func._overloadpacket in _LIKE:
            return False
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        return seeded or any(not one.is_meta and one in self._drawn for one in given)

    def _is_made_by_model(self, output: Any) -> bool:
        """Return whether the model, not the engine, made a tensor from sizes alone.

        In a backward, the engine makes zeros as large as parameters. The model makes integers, or repeats a forward."""
        if self._forwards:
            return True
        counts = not any(one.is_floating_point() for one in tensors(output))
        return in_backward() and (counts or torch.is_grad_enabled())

    def _is_known(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        if func._overloadpacket in _LIKE:
            return True
        if not given:
            return func._overloadpacket in _MADE
        return all(one in self._values if one.is_meta else _is_plain(one) for one in given)

    def _on_values(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the operation on the known values."""
        if func._overloadpacket in _NEW:
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        with without_dispatch_modes():
            return func(*self._valued(args), **self._valued(kwargs))

    def _valued(self, given: Any) -> Any:
        """Return arguments with CPU tensors for meta tensors; they have the known values, or are uninitialized."""
        if isinstance(given, dict):
            return {name: self._valued(value) for name, value in given.items()}
        if isinstance(given, list | tuple):
            return [self._valued(value) for value in given]
        if isinstance(given, torch.device):
            return _CPU
        if isinstance(given, Tensor) and given.is_meta:
            known = self._values.get(given)
            return torch.empty_like(given, device="cpu") if known is None else known
        return given

    def _keep(self, values: Tensor) -> Tensor:
        """Return a new meta tensor with known values."""
        bare = torch.empty_like(values, device="meta")
        self._note(bare, values)
        return bare

    def _by_number(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replace each known mask in `indices` by the indices of its True elements, whose number is a size."""
        found: list[Tensor | None] = []
        for one in indices:
            mask = None if one is None or one.dtype not in _MASKS else self._values.get(one)
            if mask is None:
                found.append(one)
                continue
            with without_dispatch_modes():
                places = mask.nonzero().unbind(1)
            found += map(self._keep, places)
        return found

    def _note(self, bare: Tensor, values: Tensor) -> None:
        """Remember the values of a meta tensor, a tensor on the CPU."""
        self._values[bare] = values
        self._places.add(bare.untyped_storage()._cdata)

    def _changed(self, func: OpOverload, args: Any, kwargs: Any, *, known: bool) -> None:
        """Apply an in-place operation to its arguments' known values; if it cannot be applied, forget them."""
        written = [one for one in written_arguments(func, args=args, kwargs=kwargs) if one.is_meta]
        places = {one.untyped_storage()._cdata for one in written} & self._places
        changed = [one for one in self._values if one.untyped_storage()._cdata in places] if places else []
        if known and written:
            with contextlib.suppress(RuntimeError):
                self._on_values(func, args, kwargs)
                return
        self._places -= places
        self.forget(changed)


def _is_answer(func: OpOverload, args: Any) -> bool:
    """Return whether an operation returns values of its arguments, or a tensor whose size depends on the values."""
    if func._overloadpacket is aten.index:  # if it gets no mask but indices, the size is known
        return any(one.dtype in _MASKS for one in tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _is_small(output: Any) -> bool:
    made = list(tensors(output))
    return bool(made) and all(one.is_meta and _is_plain(one) and one.numel() <= LARGEST for one in made)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_sparse)


_LABELS: Mapping[Any, int] = MappingProxyType({aten.nll_loss_forward: 1, aten.nll_loss_backward: 2})
"""Operations with class labels, and the position of the labels among their arguments."""


def run_on_meta(func: OpOverload, *, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on meta tensors; None for an optimizer's fused update."""
    if _is_update(func):
        return None
    place = _LABELS.get(func._overloadpacket)
    if place is not None and args[place].dtype == torch.uint8:  # devices accept bytes, torch's meta kernel does not
        with without_dispatch_modes():
            args = (*args[:place], args[place].long(), *args[place + 1 :])
    if func is aten._grouped_mm.default and args[0].dtype == args[1].dtype != torch.bfloat16:
        return _grouped(*args[:2], *args[2:3], **kwargs)
    if func is aten._to_dense.default and args[0].is_sparse:
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
    return func(*args, **kwargs)


class MetaKernels(LightDispatchMode):
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
