"""Define the tape of a rank: the recorded operations, collective calls and memory changes of its steps, in order.

`count_operation` returns the entry of one torch operation. Flops follow torch's own formulas (2·m·k·n for a matrix
product). Bytes are the sizes of all arguments read and tensors written; expanded elements count once. Its callers skip
views and uninitialized memory (`moves_nothing`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshwise.base.package_table import package_table
from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.flight_recorder import Activity, CallRecord
from meshwise.model.torch_private import written_arguments
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind


class Category(StrEnum):
    """Category of memory: the purpose of a tensor."""

    PARAMETERS = "parameters"  # including masters
    GATHERED = "gathered"  # full parameters while they are used (ZeRO-3)
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"  # state of a compressed reduction, such as its error feedback
    ACTIVATIONS = "activations"  # tensors kept for the backward, and temporary tensors
    STAGING = "staging"  # buffers for tensors on their way to another tier
    COMMUNICATION = "communication"  # received tensors, and tensors being sent


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """Sizes of an operation's largest matrix product: `batch` products of an (m, k) and a (k, n) matrix."""

    batch: int
    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class TapeOperation:
    """One operation that a rank ran, with its flops and bytes."""

    name: str
    """Name of the operation in `aten`, such as `mm`."""
    dtype: str
    """Dtype of its first tensor, such as `bfloat16`; "" without a tensor."""
    flops: int
    bytes: int
    """Bytes that it reads and writes."""
    product: MatrixProduct | None = None
    """Sizes of its matrix product; None if it multiplies no matrices."""
    part: float = 1.0
    """Fraction of `flops` that is computed; below 1 for causal attention, whose formula also counts masked scores."""
    recomputed: bool = False
    """True if it belongs to a forward that a backward repeats (recomputation)."""


@dataclass(frozen=True, slots=True)
class TapeCall:
    """Start of a collective, or of the send or the receive of a message."""

    record: CallRecord
    ranks: tuple[int, ...]
    """Global ranks of the group; for a message, its source and its target."""


@dataclass(frozen=True, slots=True)
class TapeWait:
    """Wait for the end of the call whose record has the number `sequence`."""

    sequence: int


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Allocation (positive) or release (negative) of `bytes` bytes of a category."""

    category: Category
    bytes: int
    host: bool = False
    """True for memory of the host, if the rank computes on a device with its own memory."""


Entry: TypeAlias = TapeOperation | TapeCall | TapeWait | MemoryChange


@dataclass(frozen=True)
class TapeSegment:
    """Entries of one activity of a rank (an action of the schedule or a phase of the step), in order."""

    activity: Activity
    entries: tuple[Entry, ...]
    steps: int = 0
    """Of an agreement: steps since the agreement before it. The tape does not show them."""
    times: int = 1
    """Of an agreement: number of steps of a round that end with such an agreement."""

    @property
    def kind(self) -> ActionKind | None:
        """The kind of the segment's action; None for a phase of the step."""
        return self.activity.kind if isinstance(self.activity, Action) else None

    def calls(self) -> Iterator[TapeCall]:
        """Yield the calls that start a collective or message in the segment, in order."""
        return (entry for entry in self.entries if isinstance(entry, TapeCall))


@dataclass(frozen=True)
class TierTraffic:
    """Bytes of a rank that move between tiers in a step."""

    link: int = 0
    """Bytes over the link between a GPU and its host."""
    disk: int = 0
    """Bytes read from and written to the disk."""


@dataclass(frozen=True)
class Tape:
    """Tape of one rank: its memory before the first step, the first step, and a later step."""

    index: int
    """Index of the rank along pp."""
    build: TapeSegment
    """Memory that exists after `parallelize`, before the first step."""
    first: tuple[TapeSegment, ...]
    """First step, with one micro-batch; this step allocates the optimizer's state."""
    steady: tuple[TapeSegment, ...]
    """Second step. It has only the recorded micro-batches; the simulator repeats them for the others."""
    off_device: Mapping[str, int]
    """Bytes of the rank's state off the device, by tier: `cpu`, `disk`."""
    microbatch_traffic: TierTraffic = field(default_factory=TierTraffic)
    update_traffic: TierTraffic = field(default_factory=TierTraffic)
    agreements: tuple[TapeSegment, ...] = ()
    """Of replicas that agree across steps: for each kind of step of two rounds, the exchanges that follow."""


aten = torch.ops.aten
_OPERATIONS = package_table("simulate/operations.toml")


@cache
def moves_nothing(func: OpOverload) -> bool:
    """Return whether an operation has no flops and no bytes: a view, uninitialized memory, or in `no_work`."""
    if func._schema.name in _OPERATIONS["no_work"]:
        return True
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


@cache
def returns_only_new(func: OpOverload) -> bool:
    """Return whether an operation only returns new tensors: no view, and no argument is changed."""
    schema = func._schema
    return (
        func is not aten._unsafe_view.default
        and bool(schema.returns)
        and all(one.alias_info is None for one in (*schema.returns, *schema.arguments))
    )


def count_operation(func: OpOverload, *, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> TapeOperation:
    """Return the flops, bytes and matrix sizes of one call of `func` that returned `output`."""
    inputs = [*tensors(args), *tensors(kwargs)]
    outputs = list(tensors(output))
    flops = _flops(func, args, kwargs, output)
    written = sum(map(_nbytes, list(written_arguments(func, args=args, kwargs=kwargs)) or outputs))
    name = func._schema.name
    looks_up, fills = name in _OPERATIONS["look_ups"], name in _OPERATIONS["zero_filled"]
    read = written if looks_up else 0 if fills else sum(map(_nbytes, inputs))
    dtype = next((str(t.dtype).removeprefix("torch.") for t in (*outputs, *inputs)), "")
    product = _product(func, args, inputs, outputs) if flops else None
    part, where = 1.0, _causal(func)
    if product is not None and where is not None and (args[where] if where < len(args) else kwargs.get("is_causal")):
        part = causal_part(product.n, cpu=name.endswith(("_for_cpu", "_for_cpu_backward")))
    return TapeOperation(name.removeprefix("aten::"), dtype, flops, read + written, product, part)


def causal_part(keys: int, *, cpu: bool) -> float:
    """Return the fraction of causal attention's flops that a kernel computes for `keys` keys and queries per sequence.

    On a GPU it is 1/2: published TFLOP/s of kernels count half of the flops. Real kernels compute whole tiles, so for
    short sequences they compute more. On a CPU it is (keys + 512) / (2 · keys), at most 1, because torch's kernel
    takes 512 keys at a time (`kvSplitSize` in ATen/native/cpu/FlashAttentionKernel.cpp)."""
    return min(1.0, (keys + 512) / (2 * keys)) if cpu else 0.5


@cache
def _causal(func: OpOverload) -> int | None:
    """Return the position of the argument `is_causal` of an operation; None if it has no such argument."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def _flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    packet = func._overloadpacket
    name = func.name()
    if name.startswith("aten::_scaled_dot_product"):
        # torch has no formula for the CPU's kernels, and before 2.13 none for key heads that several query heads share.
        backward = "_backward" in name
        shapes = [args[backward].shape[:2] + tensor.shape[2:] for tensor in args[: 3 + backward]]
        return int(sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes))
    if packet is aten._grouped_mm:
        a, b = args[:2]
        return int(2 * a.numel() * b.shape[-1] // (a.shape[0] if a.dim() > b.dim() else 1))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=output)) if formula else 0


def storages_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that store a tensor: the indices and the values of a sparse tensor, else itself."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, at most the bytes of its storage, so that expanded elements count once."""
    if tensor.is_sparse:
        return sum(map(_nbytes, storages_of(tensor)))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product(func: OpOverload, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> MatrixProduct | None:
    """Return the sizes of the matrix product, or batch of products, of a call; None for other operations."""
    packet = func._overloadpacket
    if packet is aten.convolution:
        return _windows(args[0], args[1], outputs[0], transposed=args[6], groups=args[8])
    if packet is aten.convolution_backward:
        return _windows(args[1], args[2], args[0], transposed=args[7], groups=args[9])
    if packet in (aten.addmm, aten.baddbmm):
        inputs = inputs[1:]
    if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        *products, m, k = inputs[0].shape
        return MatrixProduct(math.prod(products), m, k, inputs[1].shape[-1])
    if packet is aten._grouped_mm:
        return _grouped(inputs[0], inputs[1], outputs[0])
    if "attention" in packet.__name__:
        batch, heads, queries, width = inputs[0].shape
        keys = inputs[2 if "backward" in packet.__name__ else 1].shape[2]
        return MatrixProduct(batch * heads, queries, width, keys)
    return None


def _grouped(a: Tensor, b: Tensor, output: Tensor) -> MatrixProduct:
    """Return the sizes of a grouped matrix product: one per group if the output has 3 dims, else one for all groups."""
    batch = output.shape[0] if output.dim() == 3 else 1
    terms = a.shape[-1] // (batch if a.dim() == b.dim() == 2 else 1)
    return MatrixProduct(batch, a.shape[-2], max(1, terms), b.shape[-1])


def _windows(x: Tensor, weight: Tensor, y: Tensor, *, transposed: bool, groups: int) -> MatrixProduct:
    """Return a convolution as one matrix product per group: all windows of the input times the weight."""
    places = x if transposed else y
    channels, window = weight.shape[0] // groups, math.prod(weight.shape[1:])
    k, n = (channels, window) if transposed else (window, channels)
    return MatrixProduct(groups, places.numel() // places.shape[1], k, n)
