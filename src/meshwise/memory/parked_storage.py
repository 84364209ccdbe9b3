"""Storages that are away from the device they are used on, and what takes them there."""

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ActivationTransfers:
    """Settings for moving activations.

    | least    bytes that are worth moving
    | ahead    bytes that are brought back before they are asked for
    | staged   bytes of buffers on the way to the disk
    """

    least: int = 64 * 2**10
    ahead: int = 64 * 2**20
    staged: int = 64 * 2**20

    def __post_init__(self) -> None:
        if min(self.least, self.ahead, self.staged) < 1:
            raise ValueError(f"{self}: give at least 1 byte of each")


class ParkedStorage(ABC):
    """A storage that is away."""

    def __init__(self, size: int, *, before: "ParkedStorage | None") -> None:
        self.size = size
        self._before = None if before is None else weakref.ref(before)

    @abstractmethod
    def start(self) -> None:
        """Start to bring it back; once is enough."""

    @abstractmethod
    def get(self) -> Tensor:
        """Its bytes, on the device."""

    def fetch(self, *, ahead: int) -> Tensor:
        """Its bytes, while so many bytes of what was saved before it are on their way."""
        self.start()
        parked = alive(self._before)
        while parked is not None and ahead > 0:
            parked.start()
            ahead -= parked.size
            parked = alive(parked._before)
        return self.get()


def alive(parked: weakref.ref[ParkedStorage] | None) -> ParkedStorage | None:
    """Return the storage that `parked` refers to, or None if it no longer exists."""
    return None if parked is None else parked()


class StorageMover(ABC):
    """Mover of storages away from a device and back."""

    device: torch.device
    peak = 0

    @abstractmethod
    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Start to move the bytes of a storage; `before` is what was saved before it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it moves to."""
