"""The ranks of one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, and this rank's index among them.

    Calls for another `purpose` are apart from all others of these ranks, as if other ranks made them.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    purpose: str = ""

    @property
    def size(self) -> int:
        """Number of ranks take part."""
        return len(self.ranks)


def rooted(group: Group, *, root: int) -> Group:
    """Return the group, which has a rank of the index `root`. Raises ValueError otherwise."""
    if not 0 <= root < group.size:
        raise ValueError(f"no index {root} along {'·'.join(group.axes)}, which has {group.size} ranks")
    return group


def line(group: Group, *, source: int, target: int) -> Group:
    """Return the two ends of a message as a group of their own. Raises ValueError when they are not two ranks of the
    group.
    """
    if source == target or not (0 <= source < group.size and 0 <= target < group.size):
        raise ValueError(
            f"no message from index {source} to {target} along {group.axes[0]}, which has {group.size} ranks"
        )
    return Group(group.axes, (group.ranks[source], group.ranks[target]), int(group.index == target), "messages")
