"""Numbers in tensors by which an operator in compiled code finds an object of its rank and block.

torch.compile takes an object, or a number of an object, for a constant: code would be compiled for each block and rank
anew. A tensor is an input of the compiled code."""

import itertools
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")


class Tickets(Generic[T]):
    """Objects of one kind by ticket, as long as something else keeps them."""

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, value: T) -> Tensor:
        """Return a new ticket for `value`: a tensor with one number, on the CPU."""
        number = next(self._numbers)
        self._objects[number] = value
        return torch.tensor(number, device="cpu")

    def __getitem__(self, ticket: Tensor) -> T:
        """Return the object of a ticket."""
        return self._objects[int(ticket)]
