"""Pack the values that cross between stages: tensors to send, and a skeleton that both sides know.

The skeleton has the place, shape and dtype of each tensor, and whether a gradient returns for it. It is sent once per
edge and shape; otherwise only tensors travel. A tensor that occurs twice travels once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors


@dataclass(frozen=True)
class PackedTree:
    """Values as a skeleton and a list of tensors."""

    skeleton: Mapping[str, Any]
    """The values with meta tensors in place of tensors, `requires_grad` as it was. Pickles."""
    tensors: tuple[Tensor, ...]
    """Tensors, each once, in the order of the skeleton."""


def pack(values: Mapping[str, Any]) -> PackedTree:
    """Split values into a skeleton and tensors, which stay part of their graph."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def spec_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
            seen[id(tensor)] = (tensor, shape)
        return seen[id(tensor)][1]

    skeleton = map_tensors(spec_of, dict(values))
    return PackedTree(skeleton, tuple(tensor for tensor, _ in seen.values()))


def tensor_specs(skeleton: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the meta tensors of a skeleton, each once; `requires_grad` is set where a gradient goes back."""
    return tuple({id(tensor): tensor for tensor in tensors(dict(skeleton))}.values())


def unpack(skeleton: Mapping[str, Any], *, arrived: Sequence[Tensor]) -> dict[str, Any]:
    """Return the values from a skeleton and the arrived tensors, in the order of `tensor_specs(skeleton)`."""
    places = {id(spec): tensor for spec, tensor in zip(tensor_specs(skeleton), arrived, strict=True)}
    unpacked: dict[str, Any] = map_tensors(lambda spec: places[id(spec)], dict(skeleton))
    return unpacked


class StageEntrance(torch.autograd.Function):
    """Identity whose result is neither leaf nor view, so that a model may change its inputs in place.

    The gradient that arrives becomes the leaf's gradient without a copy. torch would copy a gradient that another
    object refers to, as a sender does when a stage passes a value on unchanged.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return the same memory."""
        ctx.leaf = leaf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Set the leaf's gradient, and return none for torch to add."""
        leaf = ctx.leaf
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def enter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for a stage to use: each leaf that requires a gradient goes through one `StageEntrance`."""
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
