"""Convert parameters and activations to the dtype of the computation.

A model that is only cast to bf16 fails at the first tensor in another dtype. Such tensors are the data, a rotary
table, a mask, or a norm that the author computes in fp32. Three measures make a plain model work unchanged:

- Floating parameters are stored in the dtype of the plan. Parameters of a norm with running statistics keep their own
  dtype: its kernel accepts activations of any dtype, but parameters only in the dtype of the statistics.
- A hook on each module that holds floating parameters itself converts the module's inputs to the parameters' dtype.
- Autocast is on during the forward. So the product of an fp32 tensor (a query after an fp32 rotary table) and a bf16
  tensor is computed in bf16. Most operands are in bf16 already, and autocast leaves them as they are.

Statistics and the loss are computed in fp32. torch's kernels for norms and softmax do so for any input, and so do the
split layers of this library. The model's output is converted to fp32 before the loss.
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
    """Convert floating parameters to `precision.parameters` in place, except in norms with running statistics."""
    dtype = precision.parameters
    if dtype is None:
        return
    kept = {id(parameter) for part in module.modules() if _has_statistics(part) for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def place_buffer(buffer: Tensor, *, precision: Precision, device: torch.device) -> Tensor:
    """Return a buffer, contiguous and on `device`; a floating buffer gets the dtype `precision.buffers` if set."""
    dtype = precision.buffers if precision.buffers and buffer.is_floating_point() else buffer.dtype
    return buffer.to(device, dtype).contiguous()


class CastHooks:
    """Hooks that convert the inputs of a model's modules to the dtype of their parameters.

    Modules without floating parameters of their own, and norms with running statistics, get no hook. If
    `precision.parameters` is None, no module gets a hook.
    """

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


def autocast_context(precision: Precision, *, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of a forward on `device`, in the dtype `precision.computes`.

    The context does nothing if this dtype is not bf16 or fp16, or if the device has no autocast.
    """
    dtype = precision.computes
    if dtype not in NARROW or not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=precision.parameters is None)


def widen_for_loss(output: Any) -> Any:
    """Return a model's output with its bf16 and fp16 tensors converted to fp32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in NARROW else tensor, output)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, RunningNorm) and module.track_running_stats


def _floating(module: nn.Module) -> Iterator[Tensor]:
    """Return the floating parameters of a module itself, without reading values, which may be off the device."""
    return (parameter for parameter in module.parameters(recurse=False) if parameter.dtype.is_floating_point)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with floating tensors in the dtype of the module's first floating parameter."""
    dtype = next((parameter.dtype for parameter in _floating(module)), None)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and dtype not in (None, tensor.dtype) else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)
