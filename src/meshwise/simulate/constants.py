"""What a forward makes of sizes alone: positions, masks, and what it asks of those.

A rehearsal's tensors have no values, and a model that asks for one cannot be rehearsed:

    positions = torch.arange(x.size(1), device=x.device)
    if (positions.diff() != 1).any(): ...                # are several texts in one row?

No batch could change this answer. So what is made of no tensor (`arange`, `ones_like`, …), or only of what was made so,
is computed beside the tensor without values, as long as it is not large, within one forward or one loss. What follows
from a batch, a parameter or a draw is not: their values decide, and a rehearsal has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.model.dispatch import TorchDispatchMode, unseen
from meshwise.tree import map_tensors, tensors

aten = torch.ops.aten

LARGEST = 2**22
"""Elements of a tensor that is computed."""

_CPU = torch.device("cpu")

_MADE = frozenset(
    {aten.arange, aten.linspace, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor, aten.tril_indices}
)
"""Operations that make values of numbers."""

_NEW = frozenset({aten.new_zeros, aten.new_ones, aten.new_full})
"""Those that take a tensor for its dtype alone."""

_LIKE = _NEW | {aten.zeros_like, aten.ones_like, aten.full_like}
"""And those that take it for its sizes."""


class Constants(TorchDispatchMode):
    """Answers for what a tensor without values that no batch changes would say."""

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()
        self._drawn = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors(args), *tensors(kwargs)]
        with torch._C.DisableTorchFunction():
            known = self._is_known(func, given)
            if known and kwargs.get("device") == _CPU and any(one.is_meta for one in given):
                return self._twin(func, args, kwargs)
            if known and _is_answer(func, args):
                return map_tensors(self._keep, self._twin(func, args, kwargs))
            output = func(*args, **kwargs)
            if self._draws(func, given):
                for one in tensors(output):
                    self._drawn[one] = True
            if func._schema.is_mutable:
                self._changed(func, args, kwargs, known=known)
            elif known and _is_small(output):
                with contextlib.suppress(RuntimeError):  # a CPU does not compute everything, and nobody may ask
                    twins = list(tensors(self._twin(func, args, kwargs)))
                    self._values.update(zip(tensors(output), twins, strict=True))
        return output

    def _draws(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        """Whether what it returns depends on a generator."""
        if func._overloadpacket in _LIKE:
            return False
        return torch.Tag.nondeterministic_seeded in func.tags or any(one in self._drawn for one in given)

    def _is_known(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        if func._overloadpacket in _LIKE:
            return True
        if self._draws(func, given):
            return False
        if not given:
            return func._overloadpacket in _MADE
        return all(one in self._values if one.is_meta else _is_plain(one) for one in given)

    def _twin(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the operation returns on the values."""
        if func._overloadpacket in _NEW:
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        with unseen():
            return func(*self._valued(args), **self._valued(kwargs))

    def _valued(self, given: Any) -> Any:
        """Arguments with the values in place of the tensors that have none."""
        if isinstance(given, dict):
            return {name: self._valued(value) for name, value in given.items()}
        if isinstance(given, list | tuple):
            return [self._valued(value) for value in given]
        if isinstance(given, torch.device):
            return _CPU
        if isinstance(given, Tensor) and given.is_meta:
            held = self._values.get(given)
            return torch.empty_like(given, device="cpu") if held is None else held
        return given

    def _keep(self, values: Tensor) -> Tensor:
        """A tensor without values that has these."""
        held = torch.empty_like(values, device="meta")
        self._values[held] = values
        return held

    def _changed(self, func: OpOverload, args: Any, kwargs: Any, *, known: bool) -> None:
        """An operation wrote into some of its arguments: it does so to their values, or nobody knows them any more."""
        by_name = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        names = (one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write)
        written = [one for name in names for one in tensors(by_name.get(name)) if one.is_meta]
        if known and written:
            with contextlib.suppress(RuntimeError):
                self._twin(func, args, kwargs)
                return
        for place in {one.untyped_storage()._cdata for one in written}:
            for other in [one for one in self._values if one.untyped_storage()._cdata == place]:
                del self._values[other]


def _is_answer(func: OpOverload, args: Any) -> bool:
    """Whether what it returns, or how large that is, follows from values."""
    if func._overloadpacket is aten.index:  # by numbers, it is as large as they are
        return any(one.dtype in (torch.bool, torch.uint8) for one in tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _is_small(output: Any) -> bool:
    made = list(tensors(output))
    return bool(made) and all(one.is_meta and _is_plain(one) and one.numel() <= LARGEST for one in made)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_sparse)
