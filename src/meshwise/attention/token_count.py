"""Number of a rank's tokens that remembers the number of all tokens (`TokenCount`).

A model reads the length of its sequence from a tensor and makes positions from it: `torch.arange(x.size(1))`,
`table[:x.size(1)]`. When the tokens are split over ranks, the length is the rank's, and the positions have to be the
global ones. A `TokenCount` is the rank's length for reshapes, and the whole length in comparisons.
"""

from typing import Any


class TokenCount(int):
    """Number of tokens on this rank; `whole`: number of tokens of the sequence."""

    whole: int

    @classmethod
    def of(cls, count: int, *, whole: int) -> "TokenCount":
        """Return `count` with the number of all tokens."""
        made = cls(count)
        made.whole = whole
        return made

    def __add__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else int(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else int(self) - other

    def __eq__(self, other: object) -> bool:
        return int(self) == other or self.whole == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __lt__(self, other: Any) -> Any:
        return self.whole < _whole(other)

    def __le__(self, other: Any) -> Any:
        return self.whole <= _whole(other)

    def __gt__(self, other: Any) -> Any:
        return self.whole > _whole(other)

    def __ge__(self, other: Any) -> Any:
        return self.whole >= _whole(other)


def _whole(other: Any) -> Any:
    return other.whole if isinstance(other, TokenCount) else other
