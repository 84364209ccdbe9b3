"""Convert parameters and activations to the dtype of the computation.

A model that is only cast to bf16 fails at the first tensor in another dtype. docs/precision.md has the three rules that
make a plain model work unchanged: for stored parameters, for the inputs of modules, and for products between modules.

On the CPU autocast converts products. On CUDA autocast would also compute norms, softmax and sums in fp32, and pay
casts and memory for it. There a mode converts the operands of products alone (`ProductCasts`). torch's kernels for
norms and softmax compute statistics in fp32 for any input, and so do the split layers of this library."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
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
    `precision.parameters` is None, no module gets a hook."""

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

    The context does nothing if this dtype is not bf16 or fp16, or if the device has no autocast. On CUDA it converts
    the operands of products alone if the parameters are stored in the dtype."""
    dtype = precision.computes
    if dtype is None or dtype not in NARROW or not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    if device.type == "cuda" and precision.parameters is not None:
        return ProductCasts(dtype)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=precision.parameters is None)


class ProductCasts(TorchFunctionMode):
    """Mode that computes products (matmul, linear, attention, convolution) in one dtype, and changes nothing else."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, with its floating operands in the dtype if it is a product."""
        if func in _PRODUCTS:
            args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _cast(self, operand: Tensor) -> Tensor:
        return operand.to(self.dtype) if operand.is_floating_point() and operand.dtype != self.dtype else operand


def active_product_casts() -> contextlib.AbstractContextManager[Any]:
    """Return a context with the `ProductCasts` of this thread, to run a part of the forward again."""
    found = _product_casts()
    return contextlib.nullcontext() if found is None else ProductCasts(found.dtype)


def product_dtype(device: str) -> torch.dtype | None:
    """Return the dtype in which this thread computes products on a type of device: of `ProductCasts`, or autocast."""
    if device == "cuda" and (found := _product_casts()) is not None:
        return found.dtype
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def _product_casts() -> ProductCasts | None:
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, ProductCasts)), None)


_METHODS = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm")
_PRODUCTS = frozenset(
    [
        *(getattr(kind, name) for name in _METHODS for kind in (torch, Tensor)),
        torch.einsum,
        *(Tensor.__matmul__, Tensor.__rmatmul__, functional.linear, functional.bilinear),
        *(getattr(functional, f"conv{kind}{dims}d") for kind in ("", "_transpose") for dims in (1, 2, 3)),
        functional.scaled_dot_product_attention,
    ]
)
"""Functions of torch that multiply matrices; autocast converts their operands too."""


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
