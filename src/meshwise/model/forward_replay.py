"""Replay a repeated forward: restore the state of the first one, and reuse its kept results.

A block whose forward is repeated in its backward may keep results that are slow to compute and small: the outputs of
matrix products. An operation below autograd, or a product that ranks share, asks here for such a result:

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
    """State that a forward reads and that changes from one forward to the next."""

    def snapshot(self) -> Any:
        """Return the state as it is now."""

    def restored(self, place: Any) -> contextlib.AbstractContextManager[None]:
        """Restore the state that `snapshot` returned as `place` inside the block."""


class ReplayTape:
    """Kept results of one block's forward, in order."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.played = 0
        """Number of results that the repeated forward has taken."""

    def protect(self, tensor: Tensor) -> None:
        """Copy kept results that share memory with this tensor, which is about to be written to."""
        written = tensor.untyped_storage()._cdata
        for index, result in enumerate(self.results):
            if any(one.untyped_storage()._cdata == written for one in tensors(result)):
                self.results[index] = map_tensors(Tensor.clone, result)

    def bytes(self) -> int:
        """Return the bytes of the kept results."""
        sizes = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(self.results)}
        return sum(sizes.values())


class ForwardReplay:
    """Switch between keeping results and taking them from a tape, with the remembered state."""

    def __init__(self) -> None:
        self._tape: ReplayTape | None = None
        self._plays = False
        self._remembered: list[RememberedState] = []

    def remember(self, state: RememberedState) -> None:
        """Let `restored` restore this state too."""
        self._remembered.append(state)

    def snapshot(self) -> list[Any]:
        """Return every remembered state as it is now."""
        return [state.snapshot() for state in self._remembered]

    @contextlib.contextmanager
    def restored(self, places: list[Any]) -> Iterator[None]:
        """Restore every remembered state, as `snapshot` returned them, inside the block."""
        with contextlib.ExitStack() as stack:
            for state, place in zip(self._remembered, places, strict=True):
                stack.enter_context(state.restored(place))
            yield

    def keeping(self, tape: ReplayTape) -> contextlib.AbstractContextManager[None]:
        """Put results on the tape inside the block."""
        return self._using(tape, plays=False)

    def playing(self, tape: ReplayTape) -> contextlib.AbstractContextManager[None]:
        """Take results from the tape, from its start on, inside the block."""
        tape.played = 0
        return self._using(tape, plays=True)

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Compute results inside the block, and keep none."""
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
        """Copy kept results that share memory with this tensor, which is about to be written to."""
        if self._tape is not None:
            self._tape.protect(tensor)


def same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor over the same memory, unknown to autograd, even as a view."""
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
