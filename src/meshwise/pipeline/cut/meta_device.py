"""Run pieces of a model on the meta device, where tensors have a shape but no values."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.meta_kernels import MetaKernels
from meshwise.model.shape_constants import ShapeConstants


def has_no_values(model: nn.Module) -> bool:
    """Return whether any parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def as_zeros(values: Any, *, device: torch.device) -> Any:
    """Return a tree of values with each tensor replaced by zeros of its shape and dtype on `device`."""
    return map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), values)


def device_of(inputs: Any) -> torch.device:
    """Return the device of the first tensor in a tree of inputs, or the CPU if there is no tensor."""
    return next((tensor.device for tensor in tensors(inputs)), torch.device("cpu"))


@contextlib.contextmanager
def sizes_known() -> Iterator[ShapeConstants]:
    """Inside the block, run pieces on meta tensors. Values that follow from sizes alone, as positions, are known."""
    with MetaKernels(), ShapeConstants() as constants, constants.forward():
        yield constants
