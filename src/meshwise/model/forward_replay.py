"""Repeat a forward in the backward with the first forward's state, and reuse the results that it has kept.

A block whose forward is repeated may keep results that are slow to compute but small: the outputs of matrix products.
Code that computes such a result calls `once` of a `ForwardReplay`, which other files name `recall`:

    | first forward         y = recall.once(compute)     calls `compute`, and keeps the result
    | repeated forward      y = recall.once(compute)     returns the kept result, without computing or communicating
    | any other forward     y = recall.once(compute)     calls `compute`

State that differs between forwards (the samples to draw for, the rows of each rank) is a `RememberedState`. A block
takes a snapshot of the state when it begins, and restores the snapshot when it is repeated."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors


class RememberedState(Protocol):
    """State that a forward reads and that differs between forwards; a repeated forward restores it."""

    def snapshot(self) -> Any:
        """Return a copy of the current state."""

    def restored(self, place: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the state is `place`, a value that `snapshot` has returned."""


class ReplayTape:
    """Kept results of one block's forward, in the order of their computation."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.played = 0
        """Number of results that the repeated forward has taken."""

    def protect(self, tensor: Tensor) -> None:
        """Copy those kept results that share memory with `tensor`, because it will be written to in place."""
        written = tensor.untyped_storage()._cdata
        for index, result in enumerate(self.results):
            if any(one.untyped_storage()._cdata == written for one in tensors(result)):
                self.results[index] = map_tensors(Tensor.clone, result)

    def bytes(self) -> int:
        """Return the bytes of the kept results' storages."""
        sizes = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(self.results)}
        return sum(sizes.values())


class ForwardReplay:
    """Store of the results and the state that repeated forwards of one model reuse (`recall` in other files)."""

    def __init__(self) -> None:
        self._tape: ReplayTape | None = None
        self._plays = False
        self._remembered: list[RememberedState] = []

    def remember(self, state: RememberedState) -> None:
        """Add `state` to the states that `snapshot` copies and `restored` restores."""
        self._remembered.append(state)

    def snapshot(self) -> list[Any]:
        """Return a copy of every remembered state, in the order of `remember`."""
        return [state.snapshot() for state in self._remembered]

    @contextlib.contextmanager
    def restored(self, places: list[Any]) -> Iterator[None]:
        """Restore every remembered state inside the block; `places` is a value that `snapshot` has returned."""
        with contextlib.ExitStack() as stack:
            for state, place in zip(self._remembered, places, strict=True):
                stack.enter_context(state.restored(place))
            yield

    def keeping(self, tape: ReplayTape) -> contextlib.AbstractContextManager[None]:
        """Return a context for a first forward, in which `once` appends results to `tape`."""
        return self._using(tape, plays=False)

    def playing(self, tape: ReplayTape) -> contextlib.AbstractContextManager[None]:
        """Return a context for a repeated forward, in which `once` returns the results of `tape` in order."""
        tape.played = 0
        return self._using(tape, plays=True)

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `once` only computes."""
        return self._using(None, plays=False)

    @contextlib.contextmanager
    def _using(self, tape: ReplayTape | None, *, plays: bool) -> Iterator[None]:
        before = self._tape, self._plays
        self._tape, self._plays = tape, plays
        try:
            yield
        finally:
            self._tape, self._plays = before

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, a tensor or tuple of tensors; in a repeated forward, the kept result."""
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
        """Copy those kept results that share memory with `tensor`, because it will be written to in place."""
        if self._tape is not None:
            self._tape.protect(tensor)


def same_memory(tensor: Tensor) -> Tensor:
    """Return a new tensor in the memory of `tensor`; autograd does not connect the two, not even as a view."""
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
