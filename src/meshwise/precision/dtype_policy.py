"""Choose the dtypes of a training: for storage, computation, gradients, updates and buffers.

They follow from the plan's `precision` and `wire`, or from `Options(precision=…)`; docs/precision.md has a table.
`Trainer.precision` reports the dtypes that the tensors of a rank really have.

The parameters are stored in the dtype of the computation, and fp32 masters are updated next to them (Micikevicius et
al., arXiv 1710.03740). `LossScale` is the loss scale of fp16 (section 3.2 there); docs/precision.md has its rules.

docs/precision.md has the three rules that make a plain model work unchanged ("Stored and computed dtypes"). On CUDA
autocast would also compute norms, softmax and sums in fp32, and pay casts and memory for it. There a mode converts the
operands of products alone (`ProductCasts`)."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwise.base.batch_norm_classes import RunningNorm
from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.plan import Plan


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training; each field is a row of the table in docs/precision.md.

    None means the `fp32` column of the table. Complex and integer parameters keep their declared dtype. Raises
    ValueError when `parameters` is bf16 or fp16 and `compute` is another dtype."""

    parameters: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduction: torch.dtype | None = None
    accumulation: torch.dtype | None = None
    master: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.parameters in NARROW and self.compute not in (None, self.parameters):
            raise ValueError(
                f"parameters={self.parameters} compute={self.compute}: half-precision parameters are computed in "
                f"their own dtype; give parameters={self.compute}"
            )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix products; None for the dtype that the model declares."""
        return self.compute or self.parameters

    @property
    def needs_loss_scale(self) -> bool:
        """True if some of the training is in fp16, where gradients underflow without a loss scale."""
        return torch.float16 in (self.parameters, self.compute, self.reduction)

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the master and of the optimizer state, for a parameter of dtype `dtype`."""
        if self.master is not None and dtype.is_floating_point:
            return self.master
        return dtype if dtype.itemsize >= 4 else torch.float32

    def accumulation_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of dtype `dtype` are accumulated."""
        return self.accumulation if self.accumulation and dtype.is_floating_point else self.master_of(dtype)

    def reduction_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of dtype `dtype` are sent and reduced."""
        return self.reduction if self.reduction and dtype.is_floating_point else self.accumulation_of(dtype)


NARROW = (torch.bfloat16, torch.float16)
"""The half-precision dtypes, which need fp32 masters."""

PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(parameters=torch.bfloat16, compute=torch.bfloat16, reduction=torch.bfloat16),
    "fp16": Precision(parameters=torch.float16, compute=torch.float16, reduction=torch.float16),
}
"""Dtypes for each value of `precision` in a plan, before `wire` changes the reduction."""

KINDS = ("parameters", "compute", "reduction", "accumulation", "master", "optimizer_state", "buffers")
"""Kinds of tensors in the report `Trainer.precision`, in its order."""

NO_DTYPE = "none"
"""Text that replaces the dtype in the report when a rank has no tensors of a kind."""

WIRES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype in which gradients are sent, for each value of `wire` in a plan except `auto`."""


def precision_of(plan: Plan) -> Precision:
    """Return the dtypes for `precision` and `wire` of a plan; a codec gets gradients in the dtype of accumulation.

    Under a `sync` across steps, `wire` is not about gradients."""
    record = PRECISIONS[plan.precision]
    return record if plan.wire == "auto" or plan.sync_axes else replace(record, reduction=WIRES.get(plan.wire))


def dtype_names(found: Mapping[str, Iterable[torch.dtype]]) -> dict[str, str]:
    """Return, for each of KINDS, the sorted names of the dtypes in `found`, joined by spaces; NO_DTYPE for none."""
    names = {kind: sorted({str(dtype).removeprefix("torch.") for dtype in found.get(kind, ())}) for kind in KINDS}
    return {kind: " ".join(dtypes) or NO_DTYPE for kind, dtypes in names.items()}


@dataclass(frozen=True)
class LossScale:
    """Loss scale between two steps. A change returns a new object.

    | value      factor of the mean loss, a power of two; raises ValueError for other numbers
    | updates    updates that were applied since the scale last changed
    | overflows  overflows in a row, up to the last step
    | patience   updates until the scale doubles
    | count      approximate number of loss terms in a batch, a power of two; 0 before the first step

    A checkpoint keeps the fields."""

    value: float = 2.0**13
    updates: int = 0
    overflows: int = 0
    patience: int = 2000
    count: float = 0.0

    LEAST = 2.0**-14
    """Smallest scale. If a gradient is not finite at this scale, no scale helps."""
    MOST = 2.0**24
    """Largest scale that is reached by doubling."""

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf or math.frexp(self.value)[0] != 0.5:
            raise ValueError(f"a loss scale of {self.value:g} is no power of two, and would round; give one, as 1024.0")

    @property
    def factor(self) -> float:
        """Factor of the summed loss: the scale over the approximate count."""
        return self.value / (self.count or 1.0)

    def expecting(self, count: float) -> "LossScale":
        """Return the scale with `count`, rounded to a power of two; unchanged if `count` is 0 or not finite."""
        return replace(self, count=2.0 ** round(math.log2(count))) if 0 < count < math.inf else self

    @property
    def exhausted(self) -> bool:
        """True if another overflow would lower the scale below `LEAST`."""
        return self.overflowed().value < self.LEAST

    def overflowed(self) -> "LossScale":
        """Return the scale after a step whose gradient was not finite: divided by 2, or more after several in a row."""
        return replace(self, value=self.value / 2 ** (self.overflows + 1), updates=0, overflows=self.overflows + 1)

    def updated(self) -> "LossScale":
        """Return the scale after a step that was applied: doubled after `patience` such steps, up to `MOST`."""
        if self.updates + 1 < self.patience or self.value >= self.MOST:
            return replace(self, updates=self.updates + 1, overflows=0)
        return replace(self, value=self.value * 2, updates=0, overflows=0)


def likely_count(batch: Any) -> int:
    """Return the size of a batch's smallest tensor (scalars aside), usually its labels; 0 without such a tensor."""
    return min((tensor.numel() for tensor in tensors(batch) if tensor.dim()), default=0)


def convert(module: nn.Module, *, precision: Precision) -> None:
    """Convert floating parameters to `precision.parameters` in place, except in norms that keep theirs."""
    dtype = precision.parameters
    if dtype is None:
        return
    kept = {id(parameter) for part in module.modules() if _keeps_dtype(part) for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def place_buffer(buffer: Tensor, *, precision: Precision, device: torch.device) -> Tensor:
    """Return a buffer, contiguous and on `device`; a floating buffer gets the dtype `precision.buffers` if set."""
    dtype = precision.buffers if precision.buffers and buffer.is_floating_point() else buffer.dtype
    return buffer.to(device, dtype).contiguous()


class ModelCasts:
    """Conversions of dtypes in the forwards of one model: hooks on its modules, and a context around each forward."""

    def __init__(self, precision: Precision, *, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._hooks: list[_InputCasts] = []
        self._converts = False
        self._fitting: set[Any] = set()
        """Signatures of the forwards whose products need no conversion; see `forward`."""

    def hook(self, module: nn.Module) -> contextlib.ExitStack:
        """Convert the inputs of modules to the dtype of their parameters, until the returned stack is closed.

        Modules without floating parameters of their own, and norms that keep their dtype, get no hook. If
        `precision.parameters` is None, no module gets a hook."""
        undo = contextlib.ExitStack()
        for part in () if self._precision.parameters is None else module.modules():
            if any(True for _ in _floating(part)) and not _keeps_dtype(part):
                self._hooks.append(_InputCasts())
                undo.callback(part.register_forward_pre_hook(self._hooks[-1], with_kwargs=True).remove)
        return undo

    def forward(self, model: nn.Module, *, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward of a batch, which computes products in the dtype `precision.compute_dtype`.

        The context does nothing if this dtype is not bf16 or fp16, or if the device has no autocast. On CUDA it
        converts the operands of products alone if the parameters are stored in the dtype."""
        dtype = self._precision.compute_dtype
        if dtype is None or dtype not in NARROW or not torch.amp.is_autocast_available(self._device.type):
            return contextlib.nullcontext()
        if self._device.type == "cuda" and self._precision.parameters is not None:
            signature = torch.is_grad_enabled(), model.training, tuple(tensor.dtype for tensor in tensors(batch))
            return contextlib.nullcontext() if signature in self._fitting else self._products(dtype, signature)
        return torch.autocast(self._device.type, dtype=dtype, cache_enabled=self._precision.parameters is None)

    @contextlib.contextmanager
    def _products(self, dtype: torch.dtype, signature: tuple[Any, ...]) -> Iterator[None]:
        """Convert products inside the block, by a mode that sees every function, which takes time.

        Once all modules have run without a conversion, later forwards of this signature have no mode. They keep it if a
        split layer asks the mode for its dtype, or if a function stands in place of a batch."""
        with ProductCasts(dtype) as casts:
            yield
        self._converts |= casts.used
        if signature[2] and not self._converts and all(hook.dtype for hook in self._hooks):
            self._fitting.add(signature)


class ProductCasts(TorchFunctionMode):
    """Mode that computes products (matmul, linear, attention, convolution) in one dtype, and changes nothing else.

    `used`: True if it has converted an operand, or a function has asked for its dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, with its floating operands in the dtype if it is a product."""
        if func in _PRODUCTS and not (all(map(self._fits, args)) and all(map(self._fits, (kwargs or {}).values()))):
            args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _fits(self, value: Any) -> bool:
        """Return whether a value needs no conversion: True for most tensors and numbers, False for trees of them."""
        if isinstance(value, Tensor):
            return value.dtype == self.dtype or not value.is_floating_point()
        return value is None or isinstance(value, int | float)

    def _cast(self, operand: Tensor) -> Tensor:
        if not operand.is_floating_point() or operand.dtype == self.dtype:
            return operand
        self.used = True
        return operand.to(self.dtype)


def active_product_casts() -> contextlib.AbstractContextManager[Any]:
    """Return a context with the `ProductCasts` of this thread, to run a part of the forward again."""
    found = _product_casts()
    return contextlib.nullcontext() if found is None else ProductCasts(found.dtype)


def product_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of products on a type of device in this thread, by `ProductCasts` or autocast; None if unset."""
    if device == "cuda" and not torch.compiler.is_dynamo_compiling() and (found := _product_casts()) is not None:
        found.used = True
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


def _keeps_dtype(module: nn.Module) -> bool:
    """Return whether a norm's parameters keep their dtype: if it has running statistics, or converts its input itself.

    The forward of a LayerNorm or GroupNorm of CLIP, Whisper and diffusion models calls `.float()`."""
    names = set(getattr(getattr(type(module).forward, "__code__", None), "co_names", ()))
    converts = isinstance(module, nn.LayerNorm | nn.GroupNorm) and names & {"float", "float32"}
    return bool(converts) or (isinstance(module, RunningNorm) and module.track_running_stats)


def _floating(module: nn.Module) -> Iterator[Tensor]:
    """Return the floating parameters of a module itself; their values, which may be off the device, are not read."""
    return (parameter for parameter in module.parameters(recurse=False) if parameter.dtype.is_floating_point)


class _InputCasts:
    """Hook that converts a module's floating arguments to `dtype`, of its first floating parameter when it runs."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.dtype is None:
            self.dtype = next((parameter.dtype for parameter in _floating(module)), None)
        if self.dtype is None:
            return None  # the parameters are on another stage
        if not kwargs and all(type(one) is Tensor and one.dtype == self.dtype for one in args):
            return None  # the usual case, without a walk through trees
        return map_tensors(self._cast, args), map_tensors(self._cast, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() and tensor.dtype != self.dtype else tensor
