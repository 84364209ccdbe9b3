"""Draw the small dropout masks of a step together when it begins, for the places and slices of the step before.

A mask takes about forty operations, whatever its size. So for a small tensor nearly all time goes into starting them.
The bits of a mask depend on a key and on indices alone, and a step mostly draws where the last one did. So the masks of
equal slices are drawn at once, by as many operations as one of them. A mask that was not foreseen is drawn when needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwise.model.random_bits import Distribution, IndexBlock, draw_many

DrawPlace: TypeAlias = tuple[str, tuple[tuple[str, int], ...], int]
"""Place of a draw: name of the module, path of the calls around it, number of the draw in the call."""

_SMALL = 2**16
"""Most elements of a mask that is drawn ahead; starting its operations takes as long as computing a larger one."""
_MOST = 2**22
"""Most elements of all masks that are drawn ahead, one byte each."""


class MaskRequest(NamedTuple):
    """Everything on which the mask of a draw depends, besides the seed and the step."""

    place: DrawPlace
    shape: tuple[int, ...]
    scores: bool
    kind: Distribution
    device: torch.device
    rows: tuple[int, int]
    region: Any


@dataclass(frozen=True)
class MaskSlice:
    """The slice of the full draw that a request needs. `turned`: its first two dims are swapped in the mask."""

    part: IndexBlock
    turned: bool

    def shaped(self, drawn: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a drawn slice in the shape of the request."""
        if self.turned:
            return drawn.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return drawn.view(shape)


class MasksAhead:
    """Masks of one step (`masks`, read-only, empty when a step begins), and its requests for those of the next step."""

    def __init__(self) -> None:
        self.masks: dict[MaskRequest, tuple[Tensor, MaskSlice]] = {}
        self._seen: dict[MaskRequest, MaskSlice] = {}

    def draw(self, key: Callable[[DrawPlace], int]) -> None:
        """Draw the masks of the present step; `key` returns the key of a draw in it."""
        groups: dict[tuple[IndexBlock, Distribution, torch.device], list[MaskRequest]] = {}
        for request, slice_ in self._seen.items():
            groups.setdefault((slice_.part, request.kind, request.device), []).append(request)
        left = _MOST
        for (part, kind, device), requests in groups.items():
            left -= len(requests) * part.numel
            if left >= 0:
                drawn = draw_many(part, keys=[key(each.place) for each in requests], kind=kind, device=device)
                for request, values in zip(requests, drawn.unbind(), strict=True):
                    slice_ = self._seen[request]
                    self.masks[request] = slice_.shaped(values, request.shape), slice_
        self._seen = {}

    def take(self, request: MaskRequest) -> Tensor | None:
        """Return the mask of a request, or None if it was not foreseen."""
        found = self.masks.get(request)
        if found is None:
            return None
        self._seen[request] = found[1]
        return found[0]

    def remember(self, request: MaskRequest, slice_: MaskSlice) -> None:
        """Foresee a request for the next step, if its mask is small and of neighbouring tokens."""
        if slice_.part.numel <= _SMALL and not slice_.part.places:
            self._seen[request] = slice_
