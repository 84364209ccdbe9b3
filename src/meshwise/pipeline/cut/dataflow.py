"""Find out on which pieces of a model each tensor of a run depends, through their outputs and their side effects.

Autograd's graph is not enough: it ends at `detach`, under `no_grad`, and at integers and booleans. So a dispatch mode
records for every operation that its results depend on its arguments. Dependencies are stored by memory, so that views
and in-place changes share them. After Python reads a number from a tensor, all later results depend on that tensor.

    | h = embedding(tokens)          h        needs embedding
    | wide = h.argmax(-1) > 3        wide     needs embedding
    | y = block(h, wide, losses)     y        needs block
    |                                losses   has an effect of block, which appended a tensor to it
    |                                h        has the effect too, if block changes h in place

A *piece* is a submodule whose call is traced as a whole. Plain Python values, such as numbers, are not followed."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.torch_private import LightDispatchMode, written_arguments


@dataclass(frozen=True)
class Dependencies:
    """Pieces and parameters on which a value depends; a key names one call of a piece."""

    needs: frozenset[str] = frozenset()
    """Keys of the pieces from whose outputs the value was computed."""
    effects: frozenset[str] = frozenset()
    """Keys of the pieces that changed the value by a side effect: in place, in a list, or in an attribute."""
    parameters: frozenset[str] = frozenset()
    """Names of the pieces' parameters from which code between pieces computed the value."""

    def __or__(self, other: "Dependencies") -> "Dependencies":
        return Dependencies(self.needs | other.needs, self.effects | other.effects, self.parameters | other.parameters)


_NOTHING = Dependencies()


def unchanged(value: Any) -> Any:
    """Return the value as it is."""
    return value


_Writer: TypeAlias = tuple[str, Callable[[Any], Any]]
"""Key of a piece that stores values in its inputs or attributes, and a function that replaces a stored value for use
outside the piece, as by zeros for a meta tensor."""


def _effect_of(key: str) -> Dependencies:
    return Dependencies(effects=frozenset((key,)))


class DataflowTracer(LightDispatchMode):
    """Dispatch mode that records the dependencies of tensors that are made or changed while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[str] = set()
        """Keys of the pieces whose outputs were changed in place."""

        self._dependencies: WeakKeyDictionary[torch.UntypedStorage, Dependencies] = WeakKeyDictionary()
        self._outputs: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._read = self._used = _NOTHING
        self._piece: str | None = None
        self.reads = _ValueReads(self)
        """Mode to enter before this one. It records reads that run no operation of torch, such as `tolist`."""

    def of(self, values: Any) -> Dependencies:
        """Return the dependencies of a tree of tensors and of all numbers that the model has read."""
        return self._of(values) | self._read

    def register_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Register parameters of pieces, so that the mode notices when code between pieces computes with them."""
        self._names.update({parameter.untyped_storage(): name for name, parameter in parameters.items()})

    def depends_on_pieces(self, tensor: Tensor) -> bool:
        """Return whether the tensor depends on a piece or on a registered parameter."""
        return self._of(tensor) != _NOTHING

    def register_output(self, tensor: Tensor, *, key: str, made: bool) -> Tensor:
        """Record a tensor as output of the piece `key`; return it detached, and copied unless `made` in new memory."""
        own = tensor.detach() if made else tensor.detach().clone()
        self._dependencies[own.untyped_storage()] = Dependencies(frozenset((key,)))
        self._outputs[own.untyped_storage()] = key
        return own

    @contextlib.contextmanager
    def inside(self, key: str) -> Iterator[None]:
        """Attribute the operations in this block to the piece `key`."""
        before, self._piece = (self._piece, self._used), key
        self._used = _NOTHING
        try:
            yield
        finally:
            self._piece, self._used = before

    def record_read(self, values: Any) -> None:
        """Record that Python reads the values of a tree of tensors."""
        dependencies = self._of(values)
        if self._piece is None:
            self._read |= dependencies
        else:
            self._used |= dependencies

    @contextlib.contextmanager
    def writing_back_changes(
        self, values: Any, *, copy: Any, key: str, stand_in: Callable[[Any], Any] = unchanged
    ) -> Iterator[None]:
        """Apply to `values`, after the block, what a piece changed in its inputs `copy`. `stand_in`: see `_Writer`."""
        before = map_tensors(unchanged, copy)
        yield
        if copy is not values:
            self._write_back(values, before, copy, (key, stand_in))

    @contextlib.contextmanager
    def writing_back_attributes(
        self, module: nn.Module, *, copy: nn.Module, key: str, stand_in: Callable[[Any], Any]
    ) -> Iterator[None]:
        """Set on `module`, after the block, each attribute that `copy`, which ran instead, has set on itself."""
        before = [dict(vars(one)) for one in copy.modules()]
        yield
        for one, other, was in zip(module.modules(), copy.modules(), before, strict=True):
            kept = {name: value for name, value in vars(other).items() if value is not was.get(name)}
            vars(one).update((name, self._copy(value, (key, stand_in))) for name, value in kept.items())

    @property
    def used(self) -> Dependencies:
        """Dependencies (without `parameters`) of all values that the running piece has used, except its own effects."""
        return Dependencies(self._used.needs, self._used.effects - {self._piece})

    def record_change(self, tensor: Tensor, *, dependencies: Dependencies) -> None:
        """Record an in-place change of a tensor: from now on its memory also has these dependencies."""
        memory = tensor.untyped_storage()
        self._dependencies[memory] = self._dependencies.get(memory, _NOTHING) | dependencies
        if memory in self._outputs:
            self.changed.add(self._outputs[memory])

    def _write_back(self, old: Any, was: Any, now: Any, writer: _Writer) -> Any:
        """Return the new value for `old`, whose copy a piece changed from `was` to `now`."""
        if isinstance(old, list) and isinstance(now, list):
            pairs = itertools.zip_longest(old, was, now[: len(old)])
            old[:] = [self._write_back(*three, writer) for three in pairs][: len(now)]
            old += [self._copy(one, writer) for one in now[len(old) :]]
        elif isinstance(old, MutableMapping) and isinstance(now, Mapping):
            for key, new in now.items():
                old[key] = self._write_back(old[key], was[key], new, writer) if key in old else self._copy(new, writer)
        elif isinstance(old, tuple) and isinstance(now, tuple) and len(old) == len(now):
            for three in zip(old, was, now, strict=True):
                self._write_back(*three, writer)
        elif now is not was:
            return self._copy(now, writer)
        elif isinstance(old, Tensor) and writer[0] in self._of(now).effects:
            self.record_change(old, dependencies=_effect_of(writer[0]))
        return old

    def _copy(self, values: Any, writer: _Writer) -> Any:
        """Return copies for use outside of the piece that stored these values."""
        key, stand_in = writer

        def copied(tensor: Tensor) -> Tensor:
            own = tensor.detach().clone()
            self._dependencies[own.untyped_storage()] = _effect_of(key)
            return own

        return map_tensors(copied, stand_in(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        decided = self._of(_size_deciding(func, given))
        placed, named = args, kwargs
        if len({tensor.is_meta for tensor in given if tensor.is_meta or tensor.dim()}) == 2:
            # A piece on meta tensors made a mask on the default device. torch mixes only 0-dim tensors across devices.
            placed, named = map_tensors(lambda x: x.to("meta") if x.dim() else x, (args, kwargs))
        result = _zeros_elsewhere(func, placed, named) if self._piece is None else None
        result = func(*placed, **named) if result is None else result
        dependencies = self._of(given)
        if self._piece is not None:
            self._used |= dependencies
            dependencies = _effect_of(self._piece)
        elif not func.is_view and func.overloadpacket not in _SHAPE_READERS:
            memories = (tensor.untyped_storage() for tensor in given)
            names = frozenset(self._names[one] for one in memories if one in self._names)
            dependencies |= Dependencies(parameters=names)
        before = {tensor.untyped_storage() for tensor in given}
        for tensor in written_arguments(func, args=args, kwargs=kwargs):
            self.record_change(tensor, dependencies=dependencies)
        made = list(tensors(result))
        for tensor in made:
            if tensor.untyped_storage() not in before:
                self._dependencies[tensor.untyped_storage()] = dependencies
        if self._piece is None:
            self._read |= decided if made else dependencies
        return result

    def _of(self, values: Any) -> Dependencies:
        found = _NOTHING
        for tensor in tensors(values):
            found |= self._dependencies.get(tensor.untyped_storage(), _NOTHING)
        return found


def _zeros_elsewhere(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return zeros for a copy from the meta device to another device, and None for any other operation."""
    device = kwargs.get("device")
    if func is not torch.ops.aten._to_copy.default or not args[0].is_meta or device is None or device.type == "meta":
        return None
    return torch.zeros_like(args[0], dtype=kwargs.get("dtype"), device=device)


class _ValueReads(TorchFunctionMode):
    """Function mode that records reads of values that run no operation of torch, such as `tolist`."""

    def __init__(self, tracer: DataflowTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VALUE_READERS:
            self._tracer.record_read(args)
        return func(*args, **(kwargs or {}))


_SHAPE_READERS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randint_like", "randn_like"),
    )
)
"""Operations that read the shape of a tensor, and no values."""

_VALUE_READERS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))
"""Functions that hand the values of a tensor to Python without an operation."""


def _size_deciding(func: Any, given: list[Tensor]) -> list[Tensor]:
    """Return the arguments whose values decide the size of the result; empty for most operations."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    masks = [tensor for tensor in given if tensor.dtype in (torch.bool, torch.uint8)]
    return masks if func.overloadpacket is torch.ops.aten.index else given
