"""Buffers that a model holds outside of its pieces, and changes as it runs.

What lies between pieces runs on every stage that gets so far. A buffer that is changed before the first piece is alike
on all of them; one that is changed later only on some, and from what they have not received.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class Outside:
    """Watches these buffers during one run."""

    def __init__(self, model: nn.Module, *, pieces: Collection[str]) -> None:
        self._model = model
        self._inside = tuple(f"{name}." if name else "" for name in pieces)
        self._start = self._began = self._state()
        self._runs = False

    def begin(self) -> None:
        """A piece runs, maybe the first."""
        if not self._runs:
            self._began, self._runs = self._state(), True

    @property
    def early(self) -> frozenset[str]:
        """Those that were changed before."""
        return _changes(self._start, self._began)

    @property
    def late(self) -> frozenset[str]:
        """Those that were changed since."""
        return _changes(self._began, self._state())

    def _state(self) -> dict[str, tuple[Tensor, int]]:
        buffers = self._model.named_buffers(remove_duplicate=False)
        return {name: (held, held._version) for name, held in buffers if not name.startswith(self._inside)}


def _changes(before: dict[str, tuple[Tensor, int]], after: dict[str, tuple[Tensor, int]]) -> frozenset[str]:
    """What is written to, or another: new ones are no state, for the next run makes them again."""
    return frozenset(
        name
        for name, (tensor, version) in before.items()
        if name not in after or after[name][0] is not tensor or after[name][1] != version
    )
