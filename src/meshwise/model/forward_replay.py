"""Replay of a repeated forward: the state that it found the first time, and results that it need not compute again.

A block whose forward is repeated in its backward may keep what is dear to compute and cheap to hold: the outputs of
matrix products. Who computes such a result (an operation below autograd, or a product that ranks share out) asks here:

    | forward     y = recall.once(compute)     computes, and keeps the result
    | repeated    y = recall.once(compute)     the kept result; nothing is computed, and no rank is asked for its part
    | otherwise   y = recall.once(compute)     computes

State that changes from forward to forward (the samples to draw for, the rows of the ranks) is a `RememberedState`. It
is read when a block begins, and restored when the block is repeated.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors


class RememberedState(Protocol):
    """Something that a forward reads and that changes from one forward to the next."""

    def here(self) -> Any:
        """Return the state as it is now."""

    def at(self, place: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, it is as it was when `here` returned this."""


class ReplayTape:
    """The kept results of one block's forward, in order."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.played = 0

    def protect(self, tensor: Tensor) -> None:
        """Copy kept results that share memory with this tensor, which is about to be written to."""
        written = tensor.untyped_storage()._cdata
        for index, result in enumerate(self.results):
            if any(one.untyped_storage()._cdata == written for one in tensors(result)):
                self.results[index] = map_tensors(Tensor.clone, result)

    def bytes(self) -> int:
        """Return the bytes of the kept results."""
        held = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(self.results)}
        return sum(held.values())


class ForwardReplay:
    """Switch between keeping results and taking them from a tape, with the remembered state."""

    def __init__(self) -> None:
        self._tape: ReplayTape | None = None
        self._plays = False
        self._remembered: list[RememberedState] = []

    def remember(self, what: RememberedState) -> None:
        """From now on, `at` puts this back."""
        self._remembered.append(what)

    def here(self) -> list[Any]:
        """Return every remembered state as it is now."""
        return [what.here() for what in self._remembered]

    @contextlib.contextmanager
    def at(self, places: list[Any]) -> Iterator[None]:
        """Inside, everything is as it was when `here` returned this."""
        with contextlib.ExitStack() as stack:
            for what, place in zip(self._remembered, places, strict=True):
                stack.enter_context(what.at(place))
            yield

    @contextlib.contextmanager
    def keeping(self, tape: ReplayTape) -> Iterator[None]:
        """Inside, results are put on the tape."""
        with self._using(tape, plays=False):
            yield

    @contextlib.contextmanager
    def playing(self, tape: ReplayTape) -> Iterator[None]:
        """Inside, results are taken from the tape."""
        tape.played = 0
        with self._using(tape, plays=True):
            yield

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, results are computed, and forgotten."""
        with self._using(None, plays=False):
            yield

    @contextlib.contextmanager
    def _using(self, tape: ReplayTape | None, *, plays: bool) -> Iterator[None]:
        before = self._tape, self._plays
        self._tape, self._plays = tape, plays
        try:
            yield
        finally:
            self._tape, self._plays = before

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, a tensor or a tuple of tensors, computed now or in the first forward."""
        tape = self._tape
        if tape is None:
            return compute()
        if self._plays and tape.played < len(tape.results):
            tape.played += 1
            return map_tensors(same_memory, tape.results[tape.played - 1])
        with self.suspended():
            result = compute()
        if not self._plays:
            tape.results.append(map_tensors(same_memory, result))
        return result

    def protect(self, tensor: Tensor) -> None:
        """Announce that this tensor is about to be written to."""
        if self._tape is not None:
            self._tape.protect(tensor)


def same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor over the same memory, which autograd knows nothing of: not even that it is a view."""
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
