"""Split the values that a stage sends into tensors and a skeleton, from which the next stage rebuilds the values.

The skeleton has the place, shape and dtype of each tensor, and whether a gradient comes back for it. It is sent once
per pair of stages and set of shapes; later messages are tensors alone. A tensor that occurs twice is sent once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors


@dataclass(frozen=True)
class PackedTree:
    """Named trees of values, split into a skeleton and tensors."""

    skeleton: Mapping[str, Any]
    """The values, with a meta tensor of the same `requires_grad` in place of each tensor; it can be pickled."""
    tensors: tuple[Tensor, ...]
    """Each tensor once, in the order of first occurrence in the skeleton."""


def pack(values: Mapping[str, Any]) -> PackedTree:
    """Split named trees of values into a skeleton and tensors; the tensors stay part of their autograd graph."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def spec_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
            seen[id(tensor)] = (tensor, shape)
        return seen[id(tensor)][1]

    skeleton = map_tensors(spec_of, dict(values))
    return PackedTree(skeleton, tuple(tensor for tensor, _ in seen.values()))


def tensor_specs(skeleton: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return each meta tensor of a skeleton once; a tensor with `requires_grad` gets a gradient back."""
    return tuple({id(tensor): tensor for tensor in tensors(dict(skeleton))}.values())


def unpack(skeleton: Mapping[str, Any], *, arrived: Sequence[Tensor]) -> dict[str, Any]:
    """Return the values of a skeleton, filled with the `arrived` tensors in the order of `tensor_specs(skeleton)`."""
    places = {id(spec): tensor for spec, tensor in zip(tensor_specs(skeleton), arrived, strict=True)}
    unpacked: dict[str, Any] = map_tensors(lambda spec: places[id(spec)], dict(skeleton))
    return unpacked


class StageEntrance(torch.autograd.Function):
    """Identity for received leaves. The result is no leaf and no view, so a model may change it in place.

    Its backward makes the arriving gradient the leaf's `.grad` without a copy. torch would copy a gradient that another
    object refers to, such as the sender of a value that a stage passes on unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return a tensor in the memory of the leaf."""
        ctx.leaf = leaf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Set the leaf's `.grad`, or add to it, and return None, so that torch adds nothing."""
        leaf = ctx.leaf
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def enter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return received values for a stage to use: each leaf that requires a gradient passes one `StageEntrance`."""
    made: dict[int, Tensor] = {}

    def inside(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor
        if id(tensor) not in made:
            entered: Tensor = StageEntrance.apply(tensor)
            made[id(tensor)] = entered
        return made[id(tensor)]

    entered: dict[str, Any] = map_tensors(inside, dict(values))
    return entered
