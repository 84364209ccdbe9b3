"""Let tensors of the CPU lie on a simulated device, and run their operations in its streams (`on_device`).

Inside the modes `tensor.device` and `device=` know a device `cuda:N`, though the values lie in memory of the CPU.
Each operation on such a tensor belongs to the current stream of its thread. A copy to or from another tensor is a copy
between device and host. So code for CUDA runs unchanged, and errors that CUDA forgives by luck are found:

    | forgotten                      what happens here
    | a wait, an event               `StreamRace` names both uses; the values are late (`queued_work.py`) or NaN
    | `keep` before a tensor dies    `StreamRace`; work that is still queued reads NaN
    | pinned memory                  an error for an asynchronous copy on a side stream
    | `select()` in a thread         its current device is number 0
    | copying to the host            `tensor.numpy()` is an error; a tensor of the host and one of the device do not mix
    | giving values to new memory    it is NaN

A thread that never uses `SimulatedStreams` is not watched."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from accelerator.queued_work import place_of_call
from accelerator.simulated_streams import SimulatedStreams, poison
from accelerator.stream_races import Memory
from meshwise.base.tensor_tree import all_tensors
from meshwise.comm.api import streams as device_streams
from meshwise.memory import recompute
from meshwise.model.torch_private import in_backward

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_READS_VALUE = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)
_MIXED = ("index", "embedding", "where", "_foreach")
"""Beginnings of the names of operations that take tensors of host and device together."""
_OF_THE_DEVICE = ("device", "is_cuda", "is_cpu")
"""Attributes of a tensor that tell where it lies."""


@contextlib.contextmanager
def on_device(streams: SimulatedStreams) -> Iterator[None]:
    """Let the tensors of this thread lie on the device of `streams` inside the block."""
    names = _DeviceNames(streams)
    with names, _Operations(streams, names):
        yield


class _DeviceNames(TorchFunctionMode):
    """Mode that translates the device `cuda:N` of Python calls to `cpu:N+1`, which `_Operations` understands.

    `cpu:0` means the host where the first tensor lies on the device. inside_device: the call that runs now has a tensor
    of the device as its first argument."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams
        self.inside_device = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        asks = func.__self__.__name__ if name == "__get__" else name  # the attribute that a getter returns
        if func is torch.device or (name == "__get__" and asks not in _OF_THE_DEVICE):
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        with torch._C.DisableTorchFunction():
            number = None if first is None or first.is_meta else self._streams.number_of(first)
        if name == "__get__" and number is not None:
            return _on_device(asks, number)
        if first is not None and name in ("numpy", "tolist", "__array__", "is_pinned"):
            return self._reads(func, name, number, args, kwargs)
        if name == "backward":
            with self:
                return _backward(*args, **kwargs)
        before, self.inside_device = self.inside_device, number is not None
        try:
            with self._packing_inside():
                return self._called(func, name, number, args, kwargs)
        finally:
            self.inside_device = before

    @contextlib.contextmanager
    def _packing_inside(self) -> Iterator[None]:
        """Let the program's pack hook run in this mode, which torch switches off inside a call with tensors."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            yield
            return

        def pack(tensor: Tensor) -> Any:
            with self:
                return hooks[0](tensor)

        torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks[1])
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _called(self, func: Any, name: str, number: int | None, args: Any, kwargs: Any) -> Any:
        if name in ("cpu", "cuda"):
            func, name, args = torch.Tensor.to, "to", (args[0], torch.device(name), *args[1:])
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            other = self._streams.number_of(args[1])
            device = torch.device("cpu") if other is None else torch.device("cuda", other)
            args = (args[0], device, args[1].dtype, *args[2:])
        asked: list[int] = []

        def translated(value: Any) -> Any:
            named = isinstance(value, str) and (value.startswith("cuda") or value == "cpu")
            device = torch.device(value) if named else value
            if not isinstance(device, torch.device) or device.type not in ("cpu", "cuda"):
                return value
            if device.type == "cpu" and device.index is not None:
                return device  # translated by the same mode, which is twice on torch's stack inside a hook
            if device.type == "cpu":
                return torch.device("cpu", 0) if number is not None else torch.device("cpu")
            asked.append(self._streams.host.device_of_thread() if device.index is None else device.index)
            is_there = name == "to" and number == asked[-1]
            return torch.device("cpu") if is_there else torch.device("cpu", asked[-1] + 1)

        if name == "to" or "device" in kwargs or any(isinstance(value, torch.device) for value in args):
            with torch._C.DisableTorchFunction():
                args = tuple(map(translated, args)) if name == "to" or "device" not in kwargs else args
                kwargs = {**kwargs, "device": translated(kwargs["device"])} if "device" in kwargs else kwargs
        result = func(*args, **kwargs)
        if asked:
            for tensor in all_tensors(result):
                self._streams.place(tensor, number=asked[-1])
        return result

    def _reads(self, func: Any, name: str, number: int | None, args: Any, kwargs: Any) -> Any:
        """Let the host read the values of a tensor."""
        tensor, text = args[0], f"{name} at {place_of_call()}"
        if name == "is_pinned":
            memory = self._streams.races.memory_of(tensor)
            return memory is not None and memory.pinned
        if number is None:
            self._streams.races.host_uses(tensor, writes=name == "numpy", text=text)
        elif name != "tolist":
            raise TypeError(f"can't convert cuda:{number} device type tensor to numpy; copy it to the host: {text}")
        else:
            self._streams.races.use(self._streams.current().name, uses=[(tensor, False)], text=text)
            self._streams.current().synchronize()
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Mode that runs each operation of this thread in the current stream of its device."""

    def __init__(self, streams: SimulatedStreams, names: _DeviceNames) -> None:
        super().__init__()
        self.streams = self._streams = streams
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        without_names = torch._C._is_torch_function_all_disabled()
        with torch._C.DisableTorchFunction():  # what is asked about tensors here is no call of the program
            return self._operation(func, args, kwargs or {}, without_names=without_names)

    def _operation(self, func: Any, args: Any, kwargs: Any, *, without_names: bool) -> Any:
        """Run an operation where it belongs. without_names: no `_DeviceNames` has seen the call that runs it."""
        stated = kwargs.get("device")
        if stated is not None and stated.type == "cpu":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        uses = list(_uses(func, args, kwargs))
        is_meta = stated is not None and stated.type == "meta"
        if func is _aten.lift_fresh.default and without_names and uses[0][0].dim():
            self._streams.place(uses[0][0], number=self._streams.rank)  # `.to(x.device)` sees no device there
        if _is_view(func) or is_meta or any(tensor.is_meta for tensor, _ in uses):
            return func(*args, **kwargs)
        on = {number for tensor, _ in uses if (number := self._streams.number_of(tensor)) is not None}
        index = None if stated is None else stated.index
        if func in _COPIES and (on or index):
            return self._copy(func, args, kwargs, index=index)
        inside = self._names.inside_device or in_backward() or without_names
        if not (index > 0 if index is not None else on or (inside and not uses)):
            for tensor, writes in uses:
                self._streams.races.host_uses(tensor, writes=writes, text=f"{func} at {place_of_call()}")
            return func(*args, **kwargs)
        self._require_one_device(func, uses, on)
        return self._run(func, args, kwargs, uses, number=index - 1 if index else min(on, default=self._streams.rank))

    def _run(self, func: Any, args: Any, kwargs: Any, uses: Sequence[tuple[Tensor, bool]], *, number: int) -> Any:
        """Run an operation now, after what the current stream waits for."""
        stream, text = self._streams.current(), f"{func} at {place_of_call()}"
        reads = () if func in _EMPTY else uses  # a shape is no value
        self._streams.races.use(stream.name, uses=reads, text=text)
        if func not in (*_EMPTY, _aten._local_scalar_dense.default):
            self._streams.before_launch()
        result: list[Any] = []
        stream.put(lambda: result.append(func(*args, **kwargs)), text=text, defers=False)
        if func in _READS_VALUE:
            stream.synchronize()
        for tensor in all_tensors(result[0]):
            if self._streams.place(tensor, number=number):
                self._streams.races.made(stream.name, tensor=tensor, text=text)
            if func in _EMPTY:
                poison(tensor)
        self._streams.queues.pass_time()
        return result[0]

    def _copy(self, func: Any, args: Any, kwargs: Any, *, index: int | None) -> Tensor:
        """Run or queue a copy on the current stream; wait for it if it is a blocking one from or to the host."""
        streams, fresh = self._streams, func is _aten._to_copy.default
        if fresh:
            source, waits = args[0], not kwargs.get("non_blocking", False)
            like = {key: kwargs.get(key) for key in ("dtype", "memory_format") if kwargs.get(key) is not None}
            target = torch.empty_like(source, **like)
            poison(target)
            if index != 0:
                streams.place(target, number=index - 1 if index else streams.number_of(source) or 0)
        else:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        stream, text = streams.current(), f"{'copy' if fresh else 'copy_'} at {place_of_call()}"
        if streams.number_of(source) is not None and streams.number_of(target) is not None:
            streams.before_launch()
        into, memory = streams.races.memory_of(target), streams.races.memory_of(source)
        hosts = [one for one in (into, memory) if one is None or one.device is None]
        pinned = all(one is not None and one.pinned for one in hosts)
        if hosts and not waits and not pinned and stream.number:
            raise RuntimeError(
                f"{text} is an asynchronous copy on {stream.name} of memory that is not pinned: it would block the "
                "host; allocate the memory with `streams.host_empty`"
            )
        streams.races.use(stream.name, uses=[(source, False), (target, True)], text=text)
        defers = stream.number > 0 or (into in hosts and not waits)
        values, place = source.detach(), target.detach()
        if defers and (stream.number == 0 or (hosts and not pinned and streams.queues.chances.random() < 0.5)):
            values, memory = (
                values.clone(),
                None,
            )  # on the default stream, later operations write to the source before this one runs

        def move() -> None:
            lost = _is_dropped(values, memory)
            place.fill_(math.nan if place.is_floating_point() else 0) if lost else place.copy_(values)

        stream.put(move, text=text, defers=defers)
        if waits and hosts:
            stream.synchronize()
        return target

    def _require_one_device(self, func: Any, uses: Sequence[tuple[Tensor, bool]], on: set[int]) -> None:
        """Raise RuntimeError as torch does, if an operation takes tensors of host and device, or of two devices."""
        strangers = [tensor for tensor, _ in uses if tensor.dim() and self._streams.number_of(tensor) is None]
        if len(on) > 1 or (strangers and on and not func.__name__.startswith(_MIXED)):
            found = {f"cuda:{number}" for number in on} | ({"cpu"} if strangers else set())
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {' and '.join(sorted(found))}, in {func} at "
                f"{place_of_call()}"
            )


def _on_device(attribute: str, number: int) -> Any:
    """Return an attribute of `_OF_THE_DEVICE` for a tensor on device `number`."""
    with torch._C.DisableTorchFunction():
        return torch.device("cuda", number) if attribute == "device" else attribute == "is_cuda"


def _backward(
    tensors: Any, gradients: Any = None, retain_graph: Any = None, create_graph: Any = None, **options: Any
) -> None:
    """Run a backward whose hooks are under the modes; torch switches them off inside a call with tensors."""
    roots = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
    given = options.pop("grad_tensors", options.pop("gradient", gradients))
    given = [given] * len(roots) if given is None or isinstance(given, Tensor) else list(given)
    if options.get("inputs") is not None:
        wanted = options.pop("inputs")
        options["inputs"] = [_edge(each) for each in ([wanted] if isinstance(wanted, Tensor) else wanted)]
    starts = [
        torch.ones_like(root) if one is None and isinstance(root, Tensor) else one
        for root, one in zip(roots, given, strict=True)
    ]
    torch.autograd.backward([_edge(each) for each in roots], starts, retain_graph, bool(create_graph), **options)


def _edge(end: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(end) if isinstance(end, Tensor) else end


@functools.cache
def _written(func: Any) -> Mapping[str, bool]:
    """Return, for each parameter of an operation, whether the operation writes to its tensors."""
    return {each.name: each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments}


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operation returns another view of its input, and reads no values."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors of an operation, and for each whether the operation writes to it."""
    written = _written(func)
    for (_, writes), value in zip(written.items(), args, strict=False):
        yield from ((tensor, writes) for tensor in _tensors(value))
    for name, value in kwargs.items():
        yield from ((tensor, written.get(name, False)) for tensor in _tensors(value))


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, list | tuple) else ()


def _is_dropped(alias: Tensor, memory: Memory | None) -> bool:
    """Return whether the program has dropped device memory: `alias` is the only view that is left."""
    if memory is None or memory.device is None or memory.kept_for:
        return False
    return int(torch._C._storage_Use_Count(alias.untyped_storage()._cdata)) <= 2


def of_this_thread() -> SimulatedStreams | None:
    """Return the streams of this thread's simulated device, or None."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode.streams for mode in modes if isinstance(mode, _Operations)), None)


# A thread on a simulated device gets the streams of that device where another thread gets those of a GPU.
_OF_A_GPU, _GPU_IN_USE = device_streams.CudaStreams, device_streams.cuda_in_use
vars(device_streams)["CudaStreams"] = lambda device: of_this_thread() or _OF_A_GPU(device)
for _module in (device_streams, recompute):
    vars(_module)["cuda_in_use"] = lambda: of_this_thread() is not None or _GPU_IN_USE()
