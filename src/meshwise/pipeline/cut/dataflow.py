"""Trace what the tensors of a running model were made of: outputs of pieces, and side effects of pieces.

Autograd's graph does not tell: it ends at `detach`, under `no_grad`, and at integers and booleans. So every operation
below autograd is watched, and what it makes was made of what it was given. Memory is followed, so views are too, and
changes in place. A number that is read from a tensor, or a shape that its values decide, may decide all that follows.

    | h = embedding(tokens)          h        needs embedding
    | wide = h.argmax(-1) > 3        wide     needs embedding
    | y = block(h, wide, losses)     y        needs block
    |                                losses   have an effect of block: it put there what it does not return
    |                                h        has one as well, if block changes it in place

Numbers and other plain values are not followed through Python. So a piece that puts a tensor into a list or mapping
that it received has an effect on everything that follows.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.dispatch_modes import TorchDispatchMode


@dataclass(frozen=True)
class Dependencies:
    """Dependencies of a value."""

    needs: frozenset[str] = frozenset()
    """Keys of the pieces whose outputs are in it."""
    effects: frozenset[str] = frozenset()
    """Keys of the pieces that have put something into it which they did not return."""
    parameters: frozenset[str] = frozenset()
    """Parameters of pieces that something between the pieces has put into it."""

    def __or__(self, other: "Dependencies") -> "Dependencies":
        return Dependencies(self.needs | other.needs, self.effects | other.effects, self.parameters | other.parameters)


_NOTHING = Dependencies()


def unchanged(value: Any) -> Any:
    """Return the value."""
    return value


@dataclass(frozen=True)
class _Hand:
    """A piece that puts something somewhere."""

    past: Dependencies
    put: Callable[[Any], Any]
    """What stands for a value, where it is put."""


class DataflowTracer(TorchDispatchMode):
    """Knows the past of every tensor that was made while it was entered; of all others, that they have none."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[str] = set()
        """Keys of the pieces whose outputs were changed in place."""

        self._pasts: WeakKeyDictionary[torch.UntypedStorage, Dependencies] = WeakKeyDictionary()
        self._outputs: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._read = self._used = _NOTHING
        self._piece: str | None = None
        self._reads = _Reads(self)

    def __enter__(self) -> "DataflowTracer":
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def of(self, values: Any) -> Dependencies:
        """Return the dependencies of a tree of tensors and of the numbers that the model has read so far."""
        return self._of(values) | self._read

    def name(self, parameters: Mapping[str, Tensor]) -> None:
        """Register parameters of pieces, so that reads between the pieces are noticed."""
        self._names.update({parameter.untyped_storage(): name for name, parameter in parameters.items()})

    def is_of_pieces(self, tensor: Tensor) -> bool:
        """Return whether something that pieces have computed is in it."""
        return self._of(tensor) != _NOTHING

    def output(self, tensor: Tensor, *, key: str, made: bool) -> Tensor:
        """Return the output of a piece in memory of its own, unless it was `made` by the piece."""
        own = tensor.detach() if made else tensor.detach().clone()
        self._pasts[own.untyped_storage()] = Dependencies(frozenset((key,)))
        self._outputs[own.untyped_storage()] = key
        return own

    @contextlib.contextmanager
    def inside(self, key: str) -> Iterator[None]:
        """Inside, a piece runs."""
        before, self._piece = (self._piece, self._used), key
        self._used = _NOTHING
        try:
            yield
        finally:
            self._piece, self._used = before

    def reads(self, past: Dependencies) -> None:
        """Python reads something with this past."""
        if self._piece is None:
            self._read |= past
        else:
            self._used |= past

    @contextlib.contextmanager
    def given(self, values: Any, *, held: Any, key: str, put: Callable[[Any], Any] = unchanged) -> Iterator[None]:
        """Inside, a piece is given `held` in place of `values`; what it changes and puts there is then here too."""
        before = map_tensors(unchanged, held)
        yield
        if held is not values:
            self._back(values, before, held, _Hand(Dependencies(effects=frozenset((key,))), put))

    @contextlib.contextmanager
    def in_place_of(self, module: nn.Module, *, held: nn.Module, key: str, put: Callable[[Any], Any]) -> Iterator[None]:
        """Run a copy of a piece instead of the piece within the block; attributes that it sets are then set on both."""
        before = [dict(vars(one)) for one in held.modules()]
        yield
        hand = _Hand(Dependencies(effects=frozenset((key,))), put)
        for one, other, was in zip(module.modules(), held.modules(), before, strict=True):
            kept = {name: value for name, value in vars(other).items() if value is not was.get(name)}
            vars(one).update((name, self._copy(value, hand)) for name, value in kept.items())

    @property
    def used(self) -> Dependencies:
        """Dependencies that the running piece has used so far."""
        return Dependencies(self._used.needs, self._used.effects - {self._piece})

    def changes(self, tensor: Tensor, *, past: Dependencies) -> None:
        """Record an in-place change of a tensor by something with the dependencies `past`."""
        memory = tensor.untyped_storage()
        self._pasts[memory] = self._pasts.get(memory, _NOTHING) | past
        if memory in self._outputs:
            self.changed.add(self._outputs[memory])

    def _back(self, old: Any, was: Any, now: Any, hand: _Hand) -> Any:
        """Return the stand-in for `now`, given that `old` replaced `was`."""
        if isinstance(old, list) and isinstance(now, list):
            pairs = itertools.zip_longest(old, was, now[: len(old)])
            old[:] = [self._back(*three, hand) for three in pairs][: len(now)]
            old += [self._copy(one, hand) for one in now[len(old) :]]
        elif isinstance(old, MutableMapping) and isinstance(now, Mapping):
            for key in now:
                old[key] = self._back(old[key], was[key], now[key], hand) if key in old else self._copy(now[key], hand)
        elif isinstance(old, tuple) and isinstance(now, tuple) and len(old) == len(now):
            for three in zip(old, was, now, strict=True):
                self._back(*three, hand)
        elif now is not was:
            return self._copy(now, hand)
        elif isinstance(old, Tensor) and hand.past.effects <= self._of(now).effects:
            self.changes(old, past=hand.past)
        return old

    def _copy(self, values: Any, hand: _Hand) -> Any:
        """Return the stand-ins for values that a piece stores where others may find them."""

        def made(tensor: Tensor) -> Tensor:
            own = tensor.detach().clone()
            self._pasts[own.untyped_storage()] = hand.past
            return own

        return map_tensors(made, hand.put(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        decided = self._of(_deciding(func, args, kwargs))
        placed, named = _in_one_place((args, kwargs))
        result = _zeros_elsewhere(func, placed, named) if self._piece is None else None
        result = func(*placed, **named) if result is None else result
        past = self._of((args, kwargs))
        if self._piece is not None:
            self._used |= past
            past = Dependencies(effects=frozenset((self._piece,)))
        elif not func.is_view and func.overloadpacket not in _SHAPED:
            memories = (tensor.untyped_storage() for tensor in tensors((args, kwargs)))
            past |= Dependencies(parameters=frozenset(self._names[one] for one in memories if one in self._names))
        given = {tensor.untyped_storage() for tensor in tensors((args, kwargs))}
        for tensor in _written(func, args, kwargs):
            self.changes(tensor, past=past)
        made = list(tensors(result))
        for tensor in made:
            if tensor.untyped_storage() not in given:
                self._pasts[tensor.untyped_storage()] = past
        if self._piece is None:
            self._read |= decided if made else past
        return result

    def _of(self, values: Any) -> Dependencies:
        found = _NOTHING
        for tensor in tensors(values):
            found |= self._pasts.get(tensor.untyped_storage(), _NOTHING)
        return found


def _in_one_place(given: Any) -> Any:
    """Return the arguments of an operation, all on the meta device if one is: a piece may create a mask without a
    device. A piece that runs there may make tensors of its own, a mask or positions, and name no device for them.
    """
    if not any(tensor.is_meta for tensor in tensors(given)):
        return given
    return map_tensors(lambda tensor: tensor if tensor.is_meta or not tensor.dim() else tensor.to("meta"), given)


def _zeros_elsewhere(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return zeros for a copy from the meta device to the example's device, or None for any other operation.

    What pieces return there is zeros as well.
    """
    device = kwargs.get("device")
    if func is not torch.ops.aten._to_copy.default or not args[0].is_meta or device is None or device.type == "meta":
        return None
    return torch.zeros_like(args[0], dtype=kwargs.get("dtype"), device=device)


class _Reads(TorchFunctionMode):
    """Notices what Python reads out of tensors past torch's operations."""

    def __init__(self, provenance: DataflowTracer) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUT:
            self._provenance.reads(self._provenance._of(args))
        return func(*args, **(kwargs or {}))


_SHAPED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randint_like", "randn_like"),
    )
)
"""What reads no values of the tensor that it is given."""

_OUT = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))
"""What gives the values of a tensor to Python."""


def _deciding(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments whose values decide the size of the result; empty for most operations."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    given = list(tensors((args, kwargs)))
    masks = [tensor for tensor in given if tensor.dtype in (torch.bool, torch.uint8)]
    return masks if func.overloadpacket is torch.ops.aten.index else given


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes to."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))
