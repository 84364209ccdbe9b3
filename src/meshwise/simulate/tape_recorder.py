"""Record a rank's operations, collective calls and memory while the training code runs on meta tensors.

Meta tensors have no values, so operations on them cost little time and no memory. The code that runs is the training
code itself with its hooks, buffers and schedules, not a second model of it. The memory of a storage counts from the
operation that returns it until the last reference ends. The predicted device need not exist here (`KernelChoice`)."""

import contextlib
import dataclasses
import inspect
import itertools
import math
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwise.attention.cp_attention import ATTENTION_DEFAULTS
from meshwise.base.mesh import Mesh
from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.flight_recorder import Activity, CallRecord, FlightRecorder, StepPhase
from meshwise.comm.api.split_and_reduce import Parts
from meshwise.comm.api.world import Axes, Group, Work
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.comm.shared_memory.host_connection import PAYLOAD_BYTES
from meshwise.comm.shared_memory.shared_segment import KEPT, fits
from meshwise.model.meta_tensor_values import run_on_meta
from meshwise.model.random_interception import ForwardAndBackwardMode
from meshwise.model.torch_private import LightDispatchMode, in_backward, without_dispatch_modes
from meshwise.optim.build_optimizer import OptimizerClass, needs_of
from meshwise.pipeline.schedules.schedule_table import COMPUTE, Action
from meshwise.simulate.step_tape import (
    Category,
    Entry,
    MemoryChange,
    TapeCall,
    TapeOperation,
    TapeSegment,
    TapeWait,
    count_operation,
    moves_nothing,
    returns_only_new,
    storages_of,
)


class Recorder:
    """Recorder of one rank's tape; it appends each entry under the current activity of the flight recorder."""

    def __init__(self, flight_recorder: FlightRecorder) -> None:
        self.flight_recorder = flight_recorder
        self._entries: list[tuple[Activity, Entry]] = []
        self._sizes: dict[int, tuple[Category, int, bool]] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watched: dict[int, torch.UntypedStorage] = {}
        self._holders: dict[int, int] = {}
        self._borrowed: set[int] = set()
        self._free_slabs: deque[int] = deque()

    def note(self, entry: Entry) -> None:
        """Append an entry under the rank's current activity."""
        self._entries.append((self.flight_recorder.doing, entry))

    def segments(self) -> tuple[TapeSegment, ...]:
        """Return the entries since the last call of `segments`, as one segment per activity, and forget them."""
        entries, self._entries = self._entries, []
        grouped = itertools.groupby(entries, key=lambda noted: noted[0])
        return tuple(TapeSegment(activity, tuple(entry for _, entry in noted)) for activity, noted in grouped)

    def record_operation(self, operation: TapeOperation | None, *, output: Any) -> None:
        """Record an operation that has run, and the memory of its output. `operation`: None if it has no cost."""
        if operation is not None:
            # Gradients are enabled during a backward only if it repeats a forward.
            repeats = torch.is_grad_enabled() and in_backward()
            self.note(dataclasses.replace(operation, recomputed=True) if operation.flops and repeats else operation)
        for tensor in tensors(output):
            for one in storages_of(tensor):
                self.record_allocation(one)

    def record_allocation(self, tensor: Tensor, *, category: Category | None = None) -> None:
        """Count the storage of a tensor once, until it is freed, under `category` (None: of the current activity).

        A storage that counts already under another category moves to the given one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            old, size, host = self._sizes[key]
            if category not in (None, old):
                self._sizes[key] = (category, size, host)
                self.note(MemoryChange(old, -size, host))
                self.note(MemoryChange(category, size, host))
            return
        kind = category or _category(self.flight_recorder.doing)
        self._sizes[key] = (kind, self._part(storage), not tensor.is_meta)
        self._references[key] = weakref.ref(storage, lambda _: self._released(key))
        self.note(MemoryChange(*self._sizes[key]))

    def borrow(self, numel: int, *, dtype: torch.dtype, category: Category | None = None) -> Tensor:
        """Return a meta tensor that counts as shared memory. It reuses the slab of a freed tensor if one fits."""
        with without_dispatch_modes():
            tensor = torch.empty(numel, dtype=dtype, device="meta")
        fitting = min((slab for slab in self._free_slabs if fits(tensor.nbytes, slab=slab)), default=None)
        if fitting is not None:
            self._free_slabs.remove(fitting)
            self.note(MemoryChange(Category.COMMUNICATION, -fitting))
        self.record_allocation(tensor, category=category)
        self._borrowed.add(tensor.untyped_storage()._cdata)
        return tensor

    def watch(self, tensor: Tensor, *, category: Category) -> None:
        """Count the memory of a tensor whose storage may be resized; call `record_growth` to record the changes."""
        self.record_allocation(tensor, category=category)
        self._watched[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def ignore(self, tensor: Tensor) -> None:
        """From now on, do not count a tensor's memory, because it is not on the device or belongs to the caller."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            category, size, host = self._sizes[key]
            self.note(MemoryChange(category, -size, host))
        self._sizes[key] = (Category.PARAMETERS, 0, False)
        self._references[key] = weakref.ref(storage, lambda _: self._released(key))

    def share(self, tensor: Tensor, *, ranks: int) -> None:
        """Record that `ranks` ranks share a tensor's memory: each rank counts an equal part."""
        self._holders[tensor.untyped_storage()._cdata] = ranks

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether the rank shares a tensor's memory with other ranks."""
        return tensor.untyped_storage()._cdata in self._holders

    def record_growth(self) -> None:
        """Record the watched tensors that were resized since the last call, because no operation shows a resize."""
        for key, storage in self._watched.items():
            category, size, host = self._sizes[key]
            if (now := self._part(storage)) != size:
                self.note(MemoryChange(category, now - size, host))
                self._sizes[key] = (category, now, host)

    def _part(self, storage: torch.UntypedStorage) -> int:
        """Return this rank's part of the bytes of a storage."""
        return storage.nbytes() // self._holders.get(storage._cdata, 1)

    def _released(self, key: int) -> None:
        category, size, host = self._sizes.pop(key)
        del self._references[key]
        self._holders.pop(key, None)
        self.note(MemoryChange(category, -size, host))
        if key in self._borrowed:
            self._borrowed.remove(key)
            self._free_slabs.append(size)
            self.note(MemoryChange(Category.COMMUNICATION, size))
            if len(self._free_slabs) > KEPT:
                self.note(MemoryChange(Category.COMMUNICATION, -self._free_slabs.popleft()))


def _category(doing: Activity) -> Category:
    """Return the default category of memory that is allocated during an activity."""
    if doing is StepPhase.UPDATE:
        return Category.OPTIMIZER
    return Category.ACTIVATIONS if isinstance(doing, Action) and doing.kind in COMPUTE else Category.COMMUNICATION


_Made: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a result."""
OperationMemo: TypeAlias = dict[Any, tuple[TapeOperation | None, tuple[_Made | None, ...], bool]]
"""Cache of operations' costs and results, and whether there is one result. A model repeats its blocks, and shape
inference is slow."""


class OperationRecorder(LightDispatchMode):
    """Dispatch mode that records every operation below autograd with its cost and outputs."""

    def __init__(self, recorder: Recorder, *, memo: OperationMemo) -> None:
        super().__init__()
        self._recorder = recorder
        self._memo = memo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # other modes must not see the sizes that are read here
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        if reads and self._recorder.flight_recorder.doing is StepPhase.UPDATE:
            return 1.0  # Adafactor reads norms; their values do not matter here
        key = (func, _described(args), _described(tuple(kwargs.items()))) if returns_only_new(func) else None
        if key and (known := self._memo.get(key)):
            cost, results, single = known
            made = tuple(one and torch.empty_strided(*one[:2], dtype=one[2], device="meta") for one in results)
            self._recorder.record_operation(cost, output=made)
            return made[0] if single else made
        output = run_on_meta(func, args=args, kwargs=kwargs)
        cost = None if moves_nothing(func) else count_operation(func, args=args, kwargs=kwargs, output=output)
        self._recorder.record_operation(cost, output=output)
        outputs = [output] if isinstance(output, Tensor) else output
        tensors = isinstance(outputs, list | tuple) and all(t is None or isinstance(t, Tensor) for t in outputs)
        if key and tensors and all(t is None or (t.is_meta and not t.is_sparse) for t in outputs):
            described = tuple(None if t is None else (t.size(), t.stride(), t.dtype) for t in outputs)
            self._memo[key] = (cost, described, isinstance(output, Tensor))
        return output


def _described(value: Any) -> Any:
    """Return a hashable description of an argument; equal descriptions give results of equal shapes."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            return tuple(map(_described, storages_of(value)))
        return (value.size(), value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return (type(value), value)


_IS_CPU, _IS_CUDA = (vars(torch._C.TensorBase)[name].__get__ for name in ("is_cpu", "is_cuda"))


class KernelChoice(ForwardAndBackwardMode):
    """Mode in which meta tensors use the kernels of a device of type `kind`, and `Tensor.is_cpu` answers for it.

    `local`: dropout is torch's own, so a GPU's fused attention can apply it. Otherwise dropout masks are equal under
    every plan, and are made outside of torch's kernels. `kernels`: they are made by `model/fused_dropout.py`, for which
    `Tensor.is_cuda` is true."""

    def __init__(self, kind: str, *, local: bool = False, kernels: bool = False) -> None:
        super().__init__()
        self._kind, self._local, self._kernels = kind, local, kernels

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _IS_CPU and args[0].is_meta:
            return self._kind == "cpu"
        if func == _IS_CUDA and args[0].is_meta:
            return self._kernels
        if func in _ON_GPU and self._kind == "cuda" and args[0].is_meta:
            return _ON_GPU[func](*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            given = {**ATTENTION_DEFAULTS, **dict(zip(ATTENTION_DEFAULTS, args, strict=False)), **kwargs}
            if not given["query"].is_meta:
                return func(*args, **kwargs)
            fused = not given["dropout_p"] or (self._local and self._kind == "cuda")
            return _attention(self._kind, given) if fused else torch._scaled_dot_product_attention_math(**given)[0]
        return func(*args, **kwargs)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    """Apply dropout as on a GPU: one kernel, which keeps a mask of one byte per element."""
    if not training or not p:
        return x
    dropped: Tensor = torch.native_dropout(x, p, train=True)[0]
    return x.copy_(dropped) if inplace else dropped


def _rms_norm(
    input: Tensor,  # noqa: A002 - torch's own name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Apply an RMS norm as on a GPU: one kernel for the forward and one for the backward.

    A layer norm replaces it here, because it reads and writes as many bytes; values do not matter."""
    normed: Tensor = torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 1e-6)[0]
    return normed


_ON_GPU: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {functional.dropout: _dropout, torch.dropout: _dropout, functional.rms_norm: _rms_norm, torch.rms_norm: _rms_norm}
)


def _attention(kind: str, given: dict[str, Any]) -> Tensor:
    """Apply attention by the fused kernel of the device `kind`, or by plain operations if there is none."""
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if (mask is not None and mask.requires_grad) or not _fused(kind, given):
        return torch._scaled_dot_product_attention_math(**given)[0]
    # On a GPU flash attention reads shared keys and values in place; other kernels need a copy for each query head.
    flash = kind == "cuda" and mask is None and query.dtype in (torch.float16, torch.bfloat16)
    if given["enable_gqa"] and key.size(1) != query.size(1) and not flash:
        times = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    causal, scale, dropped = given["is_causal"], given["scale"], given["dropout_p"]
    aten = torch.ops.aten
    if kind == "cpu":
        output: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif flash:
        output = aten._scaled_dot_product_flash_attention(query, key, value, dropped, causal, scale=scale)
    else:
        output = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, query.requires_grad, dropped, causal, scale=scale
        )
    return output[0]


def _fused(kind: str, given: dict[str, Any]) -> bool:
    """Return whether the device has a fused kernel. For a CPU, torch is asked with small tensors of the same kind."""
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return False
    if kind != "cpu":
        return True
    q, k, v = (torch.empty(1, t.size(1), 2, t.size(3), dtype=t.dtype, device="cpu") for t in (query, key, value))
    mask = None if given["attn_mask"] is None else torch.empty(2, 2, dtype=given["attn_mask"].dtype, device="cpu")
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        choice: int = torch._fused_sdp_choice(
            q, k, v, mask, 0.0, given["is_causal"], scale=given["scale"], enable_gqa=given["enable_gqa"]
        )
    return choice != 0


class _Pretence(TorchFunctionMode):
    """Mode in which meta tensors report a device of type `kind`. `makes_meta`: new tensors of this device are meta."""

    def __init__(self, kind: str, *, makes_meta: bool) -> None:
        super().__init__()
        self._device, self._makes_meta = torch.device(kind), makes_meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__ and args[0].is_meta:
            return self._device
        if kwargs.get("device") == self._device and self._makes_meta:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def optimizer_on(kind: str, *, optimizer: OptimizerClass) -> OptimizerClass:
    """Return an optimizer class that takes meta parameters for parameters on a device of this kind (`cpu`, `cuda`)."""
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if not is_class or needs_of(optimizer) == "replicas":  # parallelize refuses the first; a codec makes tensors
        return optimizer

    class Rehearsed(optimizer):  # type: ignore[misc, valid-type]
        __doc__, __module__ = optimizer.__doc__, optimizer.__module__  # `parallelize` tries slices unless it is torch's
        __signature__ = inspect.signature(optimizer)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _Pretence(kind, makes_meta=kind != "cpu"):
                super().__init__(*args, **kwargs)

        def step(self, closure: Callable[[], float] | None = None) -> Any:
            tried = not any(p.is_meta for group in self.param_groups for p in group["params"])  # `ChunkedUpdate._kept`
            with _Pretence(kind, makes_meta=kind != "cpu" or not tried):
                return super().step(closure)

    Rehearsed.__name__ = optimizer.__name__
    return Rehearsed


class StageMessages:
    """Messages (small Python values, such as shapes) between the threads that rehearse the ranks along pp.

    Only one thread runs at a time, until it waits. Otherwise all threads would compete for Python's interpreter lock,
    and switch at every operation. If a thread fails, threads that wait for it raise BrokenBarrierError."""

    def __init__(self, rehearsed: Sequence[int]) -> None:
        """`rehearsed`: for each rank along pp, the rank that is rehearsed for it."""
        self.rehearsed = tuple(rehearsed)
        self._turn = threading.Condition()
        self._failed = False
        self._messages: dict[tuple[int, int], list[Any]] = defaultdict(list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wait for this thread's turn, then run the block. If the block fails, waiting threads fail too."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._failed = True
                self._turn.notify_all()
                raise

    def exchange(self, index: int, *, value: Any) -> list[Any]:
        """Return the values of all ranks along pp, in order. Every rehearsed rank calls it with its own `value`."""
        self.send(value, source=index, target=index)
        number = len(self._messages[index, 0]) - 1
        return [self.receive(number, source=rank, target=rank) for rank in range(len(self.rehearsed))]

    def send(self, value: Any, *, source: int, target: int) -> None:
        """Store a value for `receive`; `source` and `target` are indices along pp."""
        self._messages[source, target - source].append(value)
        self._turn.notify_all()

    def receive(self, number: int, *, source: int, target: int) -> Any:
        """Wait for the message with this number (from 0) from `source` to `target`, and return its value."""
        towards = target - source  # in a V schedule values travel down too: from the next rank that is rehearsed
        while target < self.rehearsed[-1] and source > target >= self.rehearsed[source]:
            source += 1
        messages = self._messages[self.rehearsed[source], towards]
        self._turn.wait_for(lambda: len(messages) > number or self._failed)
        if len(messages) <= number:
            raise threading.BrokenBarrierError
        return messages[number]


class RehearsalWorld(TraceWorld):
    """World of one rehearsed rank: it records collectives, waits and buffers, and sends no tensor."""

    def __init__(self, *, rank: int, mesh: Mesh, recorder: Recorder, stages: StageMessages, shared: bool) -> None:
        """`shared`: all ranks are processes of one host and share its memory."""
        super().__init__(rank=rank, mesh=mesh, device="meta", flight_recorder=recorder.flight_recorder)
        self._recorder, self._stages, self._shared = recorder, stages, shared
        self._received: Counter[int] = Counter()

    @property
    def _in_step(self) -> bool:
        return self.flight_recorder.doing != StepPhase.OUTSIDE

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return an empty meta buffer for collectives; in a step it counts as gradients."""
        counted = self._in_step and self.flight_recorder.doing is not StepPhase.AGREE
        return self._made(numel, dtype=dtype, category=Category.GRADIENTS if counted else None)

    def empty_for_reduce(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an empty meta buffer for a reduction; it counts under the rank's current activity."""
        return self._made(math.prod(shape), dtype=dtype, category=None).view(tuple(shape))

    def _made(self, numel: int, *, dtype: torch.dtype, category: Category | None) -> Tensor:
        """Return a buffer; in a step, large ones are in shared memory. `category`: None for the activity's category."""
        if self._shared and self._in_step and numel * dtype.itemsize > PAYLOAD_BYTES:
            return self._recorder.borrow(numel, dtype=dtype, category=category)
        tensor = super().empty(numel, dtype=dtype)
        if category is not None:
            self._recorder.record_allocation(tensor, category=category)
        return tensor

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return a buffer that all ranks along `axes` share, or None if they share no memory or are one rank."""
        ranks = self.group(axes).size
        if not self._shared or ranks == 1:
            return None
        tensor = super().empty(numel, dtype=dtype)
        self._recorder.share(tensor, ranks=ranks)
        return tensor

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return the values of all ranks along `axes` (None: all axes); ranks of one kind have the same value."""
        group = self.group(self.mesh.names if axes is None else axes)
        if len(self._stages.rehearsed) == 1 or "pp" not in group.axes:
            return [value] * group.size
        values = self._stages.exchange(self.group("pp").index, value=value)
        each = group.size // len(values)  # pp is the outermost axis
        return [one for one in values for _ in range(each)]

    def send_value(self, value: Any, *, axis: str, to: int) -> list[Work]:
        """Send a small Python value to the rank with index `to` along pp; the list of works is empty."""
        self._stages.send(value, source=self.group(axis).index, target=to)
        return []

    def recv_value(self, *, axis: str, source: int) -> Any:
        """Wait for the next Python value from the rank with index `source` along pp, and return it."""
        self._received[source] += 1
        return self._stages.receive(self._received[source] - 1, source=source, target=self.group(axis).index)

    def waited(self, record: CallRecord) -> None:
        """Record that this rank waits for a collective to end."""
        self._recorder.record_growth()
        self._recorder.note(TapeWait(record.sequence))

    def _new_record(self, kind: str, group: Group, x: Parts, *, how: str = "") -> CallRecord:
        record = super()._new_record(kind, group, x, how=how)
        if kind == "all_gather" and all(map(self._recorder.is_shared, [x] if isinstance(x, Tensor) else x)):
            record = record._replace(bytes=0)  # ranks read shared memory, so nothing moves
        self._recorder.record_growth()
        self._recorder.note(TapeCall(record, group.ranks))
        return record
