"""Draw the small dropout masks of a step together when it begins, for the places and slices of the step before.

A mask takes about forty operations, whatever its size. So for a small tensor nearly all time goes into starting them.
The bits of a mask depend on a key and on indices alone, and a step mostly draws where the last one did. So the masks of
equal slices are drawn at once, by as many operations as one of them. A mask that was not foreseen is drawn when needed.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from meshwise.model.random_bits import Distribution, IndexBlock, draw_many

DrawPlace: TypeAlias = tuple[str, tuple[tuple[str, int], ...], int]
"""Place of a draw: name of the module, path of the calls around it, number of the draw in the call."""

_SMALL = 2**16
"""Most elements of a mask that is drawn ahead; starting its operations takes as long as computing a larger one."""
_MOST = 2**22
"""Most elements of all masks that are drawn ahead, one byte each."""


class MasksAhead:
    """Masks of one step by place (`masks`, empty when a step begins), and the places for the masks of the next step."""

    def __init__(self) -> None:
        self._seen: dict[tuple[IndexBlock, Distribution, torch.device], dict[DrawPlace, None]] = {}
        self.masks: dict[tuple[IndexBlock, Distribution, DrawPlace], Tensor] = {}

    def draw(self, key: Callable[[DrawPlace], int]) -> None:
        """Draw the masks of the present step; `key` returns the key of a draw in it."""
        left = _MOST
        for (part, kind, device), places in self._seen.items():
            left -= len(places) * part.matrix[0] * part.matrix[1]
            if left >= 0:
                masks = draw_many(part, keys=[key(place) for place in places], kind=kind, device=device)
                self.masks.update(((part, kind, place), mask) for place, mask in zip(places, masks, strict=True))
        self._seen = {}

    def take(self, part: IndexBlock, *, place: DrawPlace, kind: Distribution, device: torch.device) -> Tensor | None:
        """Return the mask of a place, read-only, or None if it was not foreseen."""
        if part.places or part.matrix[0] * part.matrix[1] > _SMALL:
            return None
        self._seen.setdefault((part, kind, device), {})[place] = None
        return self.masks.get((part, kind, place))
