"""Track the values that a forward derives from sizes and from the integers of its batch, where tensors have no values.

A rehearsal's tensors have no values, and a model that asks for one cannot be rehearsed:

    positions = torch.arange(x.size(1), device=x.device)
    if (positions.diff() != 1).any(): ...                # are several texts in one row?
    if mask.all(): ...                                   # is nothing padded?

No batch could change the first answer. So a small tensor that a forward, a loss or a repeated forward makes of no
tensor (`arange`, `ones_like`, …), or only of such tensors, is computed beside the tensor without values. The second is
an integer of the batch. It has the user's values (`meta_batch.py`), from which another batch may differ; `asked` shows
that it was read. What follows from a parameter, a draw or other numbers of a batch has no value.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.dispatch_modes import TorchDispatchMode, in_backward, unseen

aten = torch.ops.aten

LARGEST = 2**22
"""Elements of a tensor that is computed."""

_CPU = torch.device("cpu")

_MASKS = (torch.bool, torch.uint8)

_MADE = frozenset(
    {aten.arange, aten.linspace, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor, aten.tril_indices}
)
"""Operations that make values of numbers."""

_NEW = frozenset({aten.new_zeros, aten.new_ones, aten.new_full})
"""Those that take a tensor for its dtype alone."""

_LIKE = _NEW | {aten.zeros_like, aten.ones_like, aten.full_like}
"""And those that take it for its sizes."""


class _Known(NamedTuple):
    """Values that belong to a tensor without values."""

    values: Tensor
    by_batch: bool


class ShapeConstants(TorchDispatchMode):
    """Answers for what tensors without values would say. It serves one rank from its first to its last step: its inputs
    and everything made of them stay known. Tensors made of no tensor are known in a `forward` and in a backward.
    """

    def __init__(self, given: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """`given`: tensors of a batch, and their values, which other ranks are given too."""
        super().__init__()
        self.asked = False
        self._forwards = 0
        self._values = WeakTensorKeyDictionary()
        self._places: set[int] = set()
        self._drawn = WeakTensorKeyDictionary()
        self._lent: set[int] = set()
        for bare, values in given:
            self._note(bare, values, by_batch=True)
            self._lent.add(values.untyped_storage()._cdata)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, a model or a loss runs."""
        self._forwards += 1
        try:
            yield
        finally:
            self._forwards -= 1

    def forget(self, bare: Iterable[Tensor]) -> None:
        """Forget the values of these tensors."""
        for one in bare:
            self._values.pop(one, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors(args), *tensors(kwargs)]
        with torch._C.DisableTorchFunction():
            drawn = self._is_drawn(func, given)
            known = not drawn and self._is_known(func, given)
            by_batch = known and _is_of(func, given) and self._is_by_batch(given)
            if known and kwargs.get("device") == _CPU and any(one.is_meta for one in given):
                self.asked |= by_batch
                return self._on_values(func, args, kwargs)
            if known and _is_answer(func, args) and any(one.is_meta for one in given):
                self.asked |= by_batch
                return map_tensors(lambda one: self._keep(one, by_batch=by_batch), self._on_values(func, args, kwargs))
            if not known and func._overloadpacket is aten.index:
                args = (args[0], self._by_number(args[1]))
            output = func(*args, **kwargs)
            if drawn:
                for one in tensors(output):
                    if not one.is_meta:
                        self._drawn[one] = True
            if func._schema.is_mutable:
                self._changed(func, args, kwargs, known=known, by_batch=by_batch)
            elif known and _is_small(output) and (_is_of(func, given) or self._is_models(output)):
                with contextlib.suppress(RuntimeError):  # a CPU does not compute everything, and nobody may ask
                    values_made = list(tensors(self._on_values(func, args, kwargs)))
                    for one, values in zip(tensors(output), values_made, strict=True):
                        self._note(one, values, by_batch=by_batch)
        return output

    def _is_drawn(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        """Return whether what it returns depends on a generator. Of tensors without values those that do are not
        known.
        """
        if func._overloadpacket in _LIKE:
            return False
        return _is_seeded(func) or any(not one.is_meta and one in self._drawn for one in given)

    def _is_by_batch(self, given: Sequence[Tensor]) -> bool:
        return any(held.by_batch for held in map(self._values.get, given) if held is not None)

    def _is_models(self, output: Any) -> bool:
        """Return whether what was made of no tensor, or of its sizes, was made by a model. In a backward, where an
        engine makes zeros as large as parameters, that is what counts, or may have a gradient.
        """
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
            return torch.empty_like(given, device="cpu") if held is None else held.values
        return given

    def _keep(self, values: Tensor, *, by_batch: bool) -> Tensor:
        """Return a tensor without values that has these."""
        held = torch.empty_like(values, device="meta")
        self._note(held, values, by_batch=by_batch)
        return held

    def _by_number(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices that pick from a tensor of unknown values: places of a known mask replace the mask."""
        found: list[Tensor | None] = []
        for one in indices:
            held = None if one is None or one.dtype not in _MASKS else self._values.get(one)
            if held is None:
                found.append(one)
                continue
            self.asked |= held.by_batch
            with unseen():
                places = held.values.nonzero().unbind(1)
            found += [self._keep(place, by_batch=held.by_batch) for place in places]
        return found

    def _note(self, bare: Tensor, values: Tensor, *, by_batch: bool) -> None:
        """Remember the values of a tensor that has none itself."""
        self._values[bare] = _Known(values, by_batch)
        self._places.add(bare.untyped_storage()._cdata)

    def _changed(self, func: OpOverload, args: Any, kwargs: Any, *, known: bool, by_batch: bool) -> None:
        """Apply an in-place operation to the known values of its arguments, or forget them."""
        by_name = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        names = (one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write)
        written = [one for name in names for one in tensors(by_name.get(name)) if one.is_meta]
        places = {one.untyped_storage()._cdata for one in written} & self._places
        changed = [one for one in self._values if one.untyped_storage()._cdata in places] if places else []
        if known and written:
            self._own(changed)
            with contextlib.suppress(RuntimeError):
                self._on_values(func, args, kwargs)
                for one in changed if by_batch else ():
                    self._values[one] = self._values[one]._replace(by_batch=True)
                return
        self._places -= places
        self.forget(changed)

    def _own(self, changed: Iterable[Tensor]) -> None:
        """Give this rank its own copy of the batch's values before the model writes to them."""
        copies: dict[int, torch.UntypedStorage] = {}
        for one in changed:
            held = self._values[one]
            lent, old = held.values.untyped_storage(), held.values
            if lent._cdata not in self._lent:
                continue
            with unseen():
                if lent._cdata not in copies:
                    copies[lent._cdata] = lent.clone()
                own = old.new_empty(0).set_(copies[lent._cdata], old.storage_offset(), old.shape, old.stride())
            self._values[one] = held._replace(values=own)


def _is_answer(func: OpOverload, args: Any) -> bool:
    """Return whether what it returns, or how large that is, follows from values."""
    if func._overloadpacket is aten.index:  # by numbers, it is as large as they are
        return any(one.dtype in _MASKS for one in tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@cache
def _is_seeded(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_of(func: OpOverload, given: Sequence[Tensor]) -> bool:
    """Return whether its values come from tensors."""
    return bool(given) and func._overloadpacket not in _LIKE


def _is_small(output: Any) -> bool:
    made = list(tensors(output))
    return bool(made) and all(one.is_meta and _is_plain(one) and one.numel() <= LARGEST for one in made)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_sparse)
