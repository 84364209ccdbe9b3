"""Buffers that a model holds outside of its pieces, and changes as it runs.

What lies between pieces runs on every stage that gets so far. A buffer that is changed before the first piece is equal
on all stages. One that is changed later is changed on some stages only, and from values that the others have not
received.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class OutsideBuffers:
    """Watches these buffers during one run."""

    def __init__(self, model: nn.Module, *, pieces: Collection[str]) -> None:
        inside = {one for name in pieces for one in model.get_submodule(name).modules()}
        self._owners = [(name, one) for name, one in model.named_modules() if one not in inside]
        self._start = self._began = self._state()
        self._runs = False

    def begin(self) -> None:
        """Note that a piece runs."""
        if not self._runs:
            self._began, self._runs = self._state(), True

    @property
    def early(self) -> frozenset[str]:
        """Names of the buffers that were changed before the first piece."""
        return _changes(self._start, self._began)

    @property
    def late(self) -> frozenset[str]:
        """Names of the buffers that were changed since."""
        return _changes(self._began, self._state())

    def _state(self) -> dict[str, tuple[Tensor, int]]:
        return {
            f"{owner}.{name}" if owner else name: (held, held._version)
            for owner, one in self._owners
            for name, held in one.named_buffers(recurse=False)
        }


def _changes(before: dict[str, tuple[Tensor, int]], after: dict[str, tuple[Tensor, int]]) -> frozenset[str]:
    """Return the names that were written to or replaced; new names are no state, because each run makes them."""
    return frozenset(
        name
        for name, (tensor, version) in before.items()
        if name not in after or after[name][0] is not tensor or after[name][1] != version
    )
