"""Convert parameters and activations to the dtype of the computation.

A model that is only cast to bf16 breaks as soon as something in it is not bf16: the data, a rotary table, a mask, a
norm that the author computes in fp32. Three measures together let a plain model be what it is:

- parameters are kept in the dtype. Parameters of a norm with running statistics keep their dtype: its kernel takes
  activations of another dtype, but only parameters with the dtype of the statistics;
- a module that has such parameters of its own gets its inputs in their dtype, by a hook;
- between modules autocast is on, so that a product of an fp32 tensor (a query after an fp32 rotary table) and a bf16
  one is computed in bf16. As the products are in bf16 already, it converts nothing most of the time.

Precision-critical operations stay wide. torch's kernels for norms and softmax compute statistics in fp32 for any input,
split layers do the same here, and the output is converted to fp32 before the loss.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwise.base.batch_norm_classes import RunningNorm
from meshwise.base.tensor_tree import map_tensors
from meshwise.precision.dtype_policy import NARROW, Precision


def convert(module: nn.Module, *, precision: Precision) -> None:
    """Convert the parameters of a model to the dtype of `precision`, in place."""
    dtype = precision.parameters
    if dtype is None:
        return
    kept = {id(parameter) for part in module.modules() if _has_statistics(part) for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def place_buffer(buffer: Tensor, *, precision: Precision, device: torch.device) -> Tensor:
    """Return a buffer on the device, in its dtype."""
    dtype = precision.buffers if precision.buffers and buffer.is_floating_point() else buffer.dtype
    return buffer.to(device, dtype).contiguous()


class CastHooks:
    """The hooks of one model that convert the inputs of its modules; none if its parameters are as declared."""

    def __init__(self, module: nn.Module, *, precision: Precision) -> None:
        self._handles: list[RemovableHandle] = []
        if precision.parameters is None:
            return
        for part in module.modules():
            if any(True for _ in _floating(part)) and not _has_statistics(part):
                self._handles.append(part.register_forward_pre_hook(_cast_inputs, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def computing(precision: Precision, *, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products are computed in the dtype of `precision`."""
    dtype = precision.computes
    if dtype not in NARROW or not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=precision.parameters is None)


def for_loss(output: Any) -> Any:
    """Return the model's output with floating tensors in fp32 or wider."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in NARROW else tensor, output)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, RunningNorm) and module.track_running_stats


def _floating(module: nn.Module) -> Iterator[Tensor]:
    """Return the floating parameters of a module itself. Values are not read: they may be on another tier."""
    return (parameter for parameter in module.parameters(recurse=False) if parameter.dtype.is_floating_point)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the inputs in the dtype of the module's parameters."""
    dtype = next((parameter.dtype for parameter in _floating(module)), None)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and dtype not in (None, tensor.dtype) else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)
