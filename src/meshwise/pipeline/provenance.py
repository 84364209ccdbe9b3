"""What tensors were made of as a model runs: of which pieces' outputs, and of what pieces did beside returning them.

Autograd's graph does not tell: it ends at `detach`, under `no_grad`, and at integers and booleans. So every operation
below autograd is watched, and what it makes was made of what it was given. Memory is followed, so views are too, and
changes in place. A number that is read from a tensor may decide all that follows.

    h = embedding(tokens)          h        needs embedding
    wide = h.argmax(-1) > 3        wide     needs embedding
    y = block(h, wide, losses)     y        needs block
                                   losses   have an effect of block: it put there what it does not return
                                   h        has one as well, if block changes it in place
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwise.model.dispatch import TorchDispatchMode
from meshwise.tree import map_tensors, tensors


@dataclass(frozen=True)
class Past:
    """What something was made of."""

    needs: frozenset[str] = frozenset()
    """Keys of the pieces whose outputs are in it."""

    effects: frozenset[str] = frozenset()
    """Keys of the pieces that have put something into it which they did not return."""

    def __or__(self, other: Past) -> Past:
        return Past(self.needs | other.needs, self.effects | other.effects)


_NOTHING = Past()


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Hand:
    """A piece that puts something somewhere."""

    past: Past
    put: Callable[[Any], Any]
    """What stands for a value, where it is put."""


class Provenance(TorchDispatchMode):
    """Knows the past of every tensor that was made while it was entered; of all others, that they have none."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[str] = set()
        """Keys of the pieces whose outputs were changed in place."""

        self._pasts: WeakKeyDictionary[torch.UntypedStorage, Past] = WeakKeyDictionary()
        self._outputs: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._read = self._used = _NOTHING
        self._piece: str | None = None

    def of(self, values: Any) -> Past:
        """That of a tree of tensors, and of the numbers that the model has read so far."""
        return self._of(values) | self._read

    def output(self, tensor: Tensor, *, key: str, made: bool) -> Tensor:
        """What a piece returns, in memory of its own: one that was not `made` for it may be what it was given."""
        own = tensor.detach() if made else tensor.detach().clone()
        self._pasts[own.untyped_storage()] = Past(frozenset((key,)))
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

    @contextlib.contextmanager
    def given(self, values: Any, *, held: Any, key: str, put: Callable[[Any], Any] = _as_it_is) -> Iterator[None]:
        """Inside, a piece is given `held` in place of `values`; what it changes and puts there is then here too."""
        before = map_tensors(_as_it_is, held)
        yield
        if held is not values:
            self._back(values, before, held, _Hand(Past(effects=frozenset((key,))), put))

    @contextlib.contextmanager
    def in_place_of(self, module: nn.Module, *, held: nn.Module, key: str, put: Callable[[Any], Any]) -> Iterator[None]:
        """Inside, a copy of a piece runs in its place; what that keeps in attributes is then here too."""
        before = [dict(vars(one)) for one in held.modules()]
        yield
        hand = _Hand(Past(effects=frozenset((key,))), put)
        for one, other, was in zip(module.modules(), held.modules(), before, strict=True):
            kept = {name: value for name, value in vars(other).items() if value is not was.get(name)}
            vars(one).update((name, self._new(value, hand)) for name, value in kept.items())

    @property
    def used(self) -> Past:
        """What the piece that runs has used so far, however it came by it."""
        return Past(self._used.needs, self._used.effects - {self._piece})

    def changes(self, tensor: Tensor, *, past: Past) -> None:
        """A tensor is changed in place, by something with this past."""
        memory = tensor.untyped_storage()
        self._pasts[memory] = self._pasts.get(memory, _NOTHING) | past
        if memory in self._outputs:
            self.changed.add(self._outputs[memory])

    def _back(self, old: Any, was: Any, now: Any, hand: _Hand) -> Any:
        """What stands for `now`, in whose place `old` was given, when it was like `was`."""
        if isinstance(old, list) and isinstance(now, list):
            pairs = itertools.zip_longest(old, was, now[: len(old)])
            old[:] = [self._back(*three, hand) for three in pairs][: len(now)]
            old += [self._new(one, hand) for one in now[len(old) :]]
        elif isinstance(old, MutableMapping) and isinstance(now, Mapping):
            for key in now:
                old[key] = self._back(old[key], was[key], now[key], hand) if key in old else self._new(now[key], hand)
        elif isinstance(old, tuple) and isinstance(now, tuple) and len(old) == len(now):
            for three in zip(old, was, now, strict=True):
                self._back(*three, hand)
        elif now is not was:
            return self._new(now, hand)
        elif isinstance(old, Tensor) and hand.past.effects <= self._of(now).effects:
            self.changes(old, past=hand.past)
        return old

    def _new(self, values: Any, hand: _Hand) -> Any:
        def made(tensor: Tensor) -> Tensor:
            own = tensor.detach().clone()
            self._pasts[own.untyped_storage()] = hand.past
            return own

        return map_tensors(made, hand.put(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        past = self._of((args, kwargs))
        if self._piece is not None:
            self._used |= past
            past = Past(effects=frozenset((self._piece,)))
        given = {tensor.untyped_storage() for tensor in tensors((args, kwargs))}
        for tensor in _written(func, args, kwargs):
            self.changes(tensor, past=past)
        made = list(tensors(result))
        for tensor in made:
            if tensor.untyped_storage() not in given:
                self._pasts[tensor.untyped_storage()] = past
        if not made and self._piece is None:
            self._read |= past
        return result

    def _of(self, values: Any) -> Past:
        found = _NOTHING
        for tensor in tensors(values):
            found |= self._pasts.get(tensor.untyped_storage(), _NOTHING)
        return found


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What of its arguments an operation writes to."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))
