"""Pack any tree of values that crosses between stages: tensors to send, and a skeleton to agree on.

Both sides need the skeleton (where each tensor belongs, its shape and dtype, whether a gradient returns for it). It is
sent once per edge, and again when it changes; otherwise only tensors travel. A tensor that occurs twice travels once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors


@dataclass(frozen=True)
class PackedTree:
    """Values taken apart."""

    skeleton: Mapping[str, Any]
    """The values with meta tensors in place of tensors, `requires_grad` as it was. Pickles."""
    tensors: tuple[Tensor, ...]
    """The tensors, each once, in the order of the skeleton."""


def pack(values: Mapping[str, Any]) -> PackedTree:
    """Take values apart. The tensors stay part of their graph."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def bone(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
            seen[id(tensor)] = (tensor, shape)
        return seen[id(tensor)][1]

    skeleton = map_tensors(bone, dict(values))
    return PackedTree(skeleton, tuple(tensor for tensor, _ in seen.values()))


def tensor_specs(skeleton: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the meta tensors of a skeleton, each once: what to expect, and `requires_grad` where a gradient goes
    back.
    """
    return tuple({id(tensor): tensor for tensor in tensors(dict(skeleton))}.values())


def unpack(skeleton: Mapping[str, Any], *, arrived: Sequence[Tensor]) -> dict[str, Any]:
    """Return the values again, with the tensors that arrived in the order of `tensor_specs(skeleton)`."""
    places = {id(bone): tensor for bone, tensor in zip(tensor_specs(skeleton), arrived, strict=True)}
    unpacked: dict[str, Any] = map_tensors(lambda bone: places[id(bone)], dict(skeleton))
    return unpacked


class StageEntrance(torch.autograd.Function):
    """The identity, whose result is no leaf and no view: a model may change in place what it was given.

    The gradient that reaches it is the leaf's gradient itself. torch would copy a gradient that another object holds,
    as the sender does where the stage passes a value on unchanged.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return the same memory."""
        ctx.leaf = leaf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Torch has nothing left to add to the leaf."""
        leaf = ctx.leaf
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def enter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a stage may use them: leaves that want a gradient go through an `StageEntrance`, one for each
    tensor.
    """
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
