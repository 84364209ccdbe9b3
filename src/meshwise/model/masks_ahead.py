"""Draw the small dropout masks of a step together when it begins, for the draws of the step before.

A mask takes about forty operations, whatever its size. So for a small tensor nearly all time goes into starting them.
The bits of a mask depend on a key and on indices alone, and a step mostly draws where the last one did. So the masks of
equal slices are drawn at once, by as many operations as one of them. A mask that was not foreseen is drawn when needed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwise.model.random_bits import Distribution, IndexBlock, draw_many

DrawPlace: TypeAlias = tuple[str, tuple[tuple[str, int], ...], int]
"""Place of a draw: name of the module, path of the calls around it, number of the draw in the call."""

_SMALL, _MOST = 2**16, 2**22
"""Most elements of a mask that is drawn ahead, and of all of them; larger masks take long to compute, not to start."""


class MaskRequest(NamedTuple):
    """A draw of a mask; `slicing` is everything on which the slice of the full draw depends."""

    place: DrawPlace
    shape: tuple[int, ...]
    kind: Distribution
    device: torch.device
    slicing: tuple[Any, ...]


class MasksAhead:
    """Masks of one step by request (`masks`, read-only, empty when a step begins), and the draws of the step so far."""

    def __init__(self) -> None:
        self.masks: dict[MaskRequest, Tensor] = {}
        self._parts: dict[MaskRequest, IndexBlock] = {}
        self._seen: dict[MaskRequest, IndexBlock] = {}

    def draw(self, key: Callable[[DrawPlace], int]) -> None:
        """Draw the masks of the present step; `key` returns the key of a draw in it."""
        self._parts, self._seen, left = self._seen, {}, _MOST
        groups: dict[Any, list[MaskRequest]] = {}
        for request, part in self._parts.items():
            groups.setdefault((part, request.kind, request.device), []).append(request)
        for (part, kind, device), requests in groups.items():
            left -= len(requests) * part.numel
            if left >= 0:
                drawn = draw_many(part, keys=[key(each.place) for each in requests], kind=kind, device=device)
                self.masks |= {each: mask.view(each.shape) for each, mask in zip(requests, drawn.unbind(), strict=True)}

    def take(self, request: MaskRequest) -> Tensor | None:
        """Return the mask of a draw, or None if the draw was not foreseen."""
        mask = self.masks.get(request)
        if mask is not None:
            self._seen[request] = self._parts[request]
        return mask

    def remember(self, request: MaskRequest, *, part: IndexBlock) -> None:
        """Foresee a draw in the next step, if its mask is small and of neighbouring tokens."""
        if part.numel <= _SMALL and not part.places:
            self._seen[request] = part
