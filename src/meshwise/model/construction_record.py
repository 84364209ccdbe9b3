"""Build a model on meta tensors, and record how the values of its tensors are computed.

A model larger than one device cannot be built first and split afterwards. On torch's meta device it costs no memory,
but loses every value; a second initialization (`reset_parameters`) is missing for buffers, and users forget it. So
here the user's own constructor runs once on meta tensors, and every tensor operation is recorded (factories, in-place
initialization, arithmetic, copies). The record is replayed for one tensor at a time.

The record is about storages, not tensors. A view is only a storage and a place in it, so operations that make views
are not recorded. Two modes observe the constructor, in the calling thread only:

- `_Recorder` sees every operation below autograd. Tensors with values that the constructor uses (`torch.tensor`, numpy,
  a checkpoint) are constants, each represented by a meta tensor.
- `_CpuPretence` makes meta tensors report the CPU as their device, because initializers and models do less on
  meta tensors. When the constructor reads values (`.tolist()`, `print`), the mode computes them.

The values of any single tensor follow from the record: only the operations on which it depends run, in order, and
memory is freed after its last use. docs/architecture.md has an example ("The life of a parameter").

Every random operation draws from its own generator. The generator's seed is a hash of the model's seed, a tensor's name
and a number. The tensor is the first parameter or buffer that depends on the operation, and the number counts its
operations. So the values of a parameter depend on no other part of the model, no order and no rank. The global
generators stay unchanged."""

import contextlib
import hashlib
import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.parameter_table import refuse_sparse
from meshwise.model.torch_private import LightDispatchMode, without_dispatch_modes, written_arguments

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ConstructionOperation:
    """One operation of the constructor. Its tensors are meta tensors: each is a view of a storage."""

    run: Callable[..., Any]
    """The function to call; a random operation takes the keyword `generator`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor | None, ...]
    """Results of the operation; None for a result in the storage of an argument."""
    writes: tuple[int, ...]
    """Identities (see `storage`) of the storages that the operation changes or creates."""
    reads: tuple[int, ...]
    """Identities of the storages whose earlier values the operation reads."""
    random: bool = False
    uninitialised: bool = False
    """True if the results are memory that was never written (`torch.empty`)."""
    shapes_only: bool = False
    """True if the operation reads only the shapes of its tensors (`torch.zeros_like`), which stay meta tensors."""


def storage(t: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    identity: int = t.untyped_storage()._cdata
    return identity


class ConstructionRecord:
    """Record of all tensor operations of one model's construction, in order; all draws follow from its `seed`."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self._operations: list[ConstructionOperation] = []
        self._writers: dict[int, list[int]] = {}
        self._constants: dict[int, Tensor] = {}  # their bytes
        self._known: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no identity is used twice
        self._streams: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def knows(self, t: Tensor) -> bool:
        """Return whether the tensor's storage was seen during the construction."""
        return storage(t) in self._known

    def learn(self, t: Tensor) -> int:
        """Make the storage of a meta tensor known, and return its identity."""
        self._known.setdefault(storage(t), t.untyped_storage())
        return storage(t)

    def learn_constant(self, t: Tensor, *, values: Tensor) -> None:
        """Make the storage of a meta tensor known as a constant, with the bytes `values`."""
        self._constants[self.learn(t)] = values

    def add(self, operation: ConstructionOperation) -> None:
        """Append an operation; the storages of all its tensors must be known."""
        for key in operation.writes:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def name_draws(self, wanted: Sequence[Tensor], *, name: str) -> None:
        """Give seeds made from `name` to the random operations on which `wanted` depend, if they have none yet."""
        for index in self._needed(wanted):
            if self._operations[index].random and index not in self._streams:
                self._streams[index] = f"{name}\0{self._counts[name]}"
                self._counts[name] += 1

    def values(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that the meta tensors `wanted` have at the end of the record, on the CPU.

        An element that was never written is NaN; in a tensor of integers or booleans, 0."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.name_draws(wanted, name="(construction)")  # if the constructor reads them before they have a name
            indices = self._needed(wanted)
            memory = self._start(indices, wanted)
            returned = {storage(t) for t in wanted}
            last = {key: i for i in indices for op in [self._operations[i]] for key in (*op.reads, *op.writes)}
            for index in indices:
                operation = self._operations[index]
                self._run(index, memory)
                for key in {*operation.reads, *operation.writes} - returned:
                    if last[key] == index:
                        del memory[key]
            return [_view(t, memory) for t in wanted]

    def _needed(self, wanted: Sequence[Tensor]) -> list[int]:
        """Return the indices of the operations that `wanted` depends on, in order."""
        found: set[int] = set()
        open_ = [(storage(t), len(self._operations)) for t in wanted]
        while open_:
            key, before = open_.pop()
            writers = self._writers.get(key, [])
            latest = bisect_left(writers, before) - 1
            if latest < 0:
                continue  # a constant that no operation has changed
            first = [] if key in self._constants else writers[:1]  # the first one creates the memory
            for index in {*first, writers[latest]} - found:
                found.add(index)
                open_ += [(read, index) for read in self._operations[index].reads]
        return sorted(found)

    def _start(self, indices: Sequence[int], wanted: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the storages of the constants that the operations use, copied if they are written or returned."""
        operations = [self._operations[index] for index in indices]
        changed = {key for operation in operations for key in operation.writes} | {storage(t) for t in wanted}
        used = changed | {key for operation in operations for key in operation.reads}
        return {
            key: constant.to(CPU, copy=key in changed).untyped_storage()
            for key, constant in self._constants.items()
            if key in used
        }

    def _run(self, index: int, memory: dict[int, torch.UntypedStorage]) -> None:
        operation = self._operations[index]
        args, kwargs = operation.args, dict(operation.kwargs)
        if not operation.shapes_only:
            args, kwargs = map_tensors(lambda t: _view(t, memory), (args, kwargs))
        if operation.random:
            # torch's CPU generator keeps 32 bits of its seed. Among 1,000 streams two are equal with a chance of 1e-4.
            digest = hashlib.blake2b(f"{self.seed}\0{self._streams[index]}".encode(), digest_size=4).digest()
            kwargs["generator"] = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        results = list(tensors(operation.run(*args, **kwargs)))
        created = [(was, got) for was, got in zip(operation.outputs, results, strict=True) if was is not None]
        if any(was.dtype != got.dtype for was, got in created):
            # With integer arguments the result has torch's default dtype, which was another one at construction.
            dtype = next(was.dtype for was, _ in created)
            args = map_tensors(lambda t: t if t.dtype == torch.bool or t.is_floating_point() else t.to(dtype), args)
            results = [t.to(dtype) for t in tensors(operation.run(*args, **kwargs))]
        for was, got in zip(operation.outputs, results, strict=True):
            if was is not None:
                memory[storage(was)] = _as_laid_out(was, got).untyped_storage()
                if operation.uninitialised:
                    got.fill_(math.nan if got.is_floating_point() or got.is_complex() else 0)


def _view(t: Tensor, memory: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """Return the tensor with values that is the same view of its storage as the meta tensor `t`."""
    source = memory[storage(t)]
    view = torch.empty(0, dtype=t.dtype, device=source.device).set_(source, t.storage_offset(), t.size(), t.stride())
    view = view.conj() if t.is_conj() else view
    return torch._neg_view(view) if t.is_neg() else view


def _as_laid_out(was: Tensor, got: Tensor) -> Tensor:
    """Return `got` with the strides of its meta tensor `was`, because recorded views use these strides."""
    if got.stride() == was.stride() and got.storage_offset() == was.storage_offset():
        return got
    return torch.empty_strided(was.size(), was.stride(), dtype=was.dtype, device=CPU).copy_(got)


META = torch.device("meta")

_NAMES = "zero fill copy normal uniform bernoulli random exponential geometric cauchy log_normal"
_OVERWRITING = frozenset(f"aten::{name}_" for name in _NAMES.split())


@contextlib.contextmanager
def recording(*, seed: int) -> Iterator[ConstructionRecord]:
    """Record this thread's tensor operations inside the block, on meta tensors; all draws follow from `seed`."""
    record = ConstructionRecord(seed=seed)
    with _Recorder(record), _CpuPretence(record):
        yield record


class _Traits:
    """Properties of an operation, from its schema and tags."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.names = [argument.name for argument in schema.arguments]
        self.reads_values = torch.Tag.data_dependent_output in func.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.overwrites = schema.name in _OVERWRITING
        name = schema.name.removeprefix("aten::")
        self.shapes_only = "device" in self.names and (name.startswith("new_") or name.endswith("_like"))
        self.uninitialised = name.removeprefix("new_").startswith("empty")
        self.run = _with_generator(func) if self.random else func


def _with_generator(func: Any) -> Any:
    """Return the overload of a random operation that takes a generator. Raises ValueError if torch has none."""
    taken = {argument.name: str(argument.type) for argument in func._schema.arguments}
    if "generator" in taken:
        return func
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        offered = {argument.name: str(argument.type) for argument in overload._schema.arguments}
        if offered.pop("generator", None) and offered == taken:
            return overload
    raise ValueError(
        f"the model's constructor draws random numbers with {func}, which takes no generator, so ranks would draw "
        "different numbers. Draw them with torch.rand, torch.randn or an initialiser of torch.nn.init"
    )


_traits_of = cache(_Traits)


class _Recorder(LightDispatchMode):
    """Mode that runs every operation on meta tensors and records it."""

    def __init__(self, record: ConstructionRecord) -> None:
        super().__init__()
        self._record = record
        self._shadows: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traits = _traits_of(func)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            args, kwargs = map_tensors(self._on_meta, (tuple(args), dict(kwargs or {})))
            kwargs |= dict.fromkeys(kwargs.keys() & {"generator", "pin_memory"})
            if traits.reads_values:
                return func(*_values(self._record, args), **_values(self._record, kwargs))
            return self._run(func, args, kwargs)

    def _on_meta(self, t: Tensor) -> Tensor:
        """Return `t` if it is on the meta device; otherwise record a constant, and return a meta tensor like `t`."""
        if t.is_meta and not self._record.knows(t):
            raise ValueError(
                f"the model's constructor uses a meta tensor of shape {tuple(t.shape)}, whose values are unknown; "
                "build the whole model inside the function, and leave the meta device to meshwise"
            )
        if t.is_meta:
            return t
        memory = t.untyped_storage()
        if memory._cdata not in self._shadows:
            shadow = torch.empty(memory.nbytes(), dtype=torch.uint8, device=META)
            self._record.learn_constant(shadow, values=torch.empty(0, dtype=torch.uint8, device=t.device).set_(memory))
            self._shadows[memory._cdata] = shadow
        source = self._shadows[memory._cdata].untyped_storage()
        return torch.empty(0, dtype=t.dtype, device=META).set_(source, t.storage_offset(), t.size(), t.stride())

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = _traits_of(func)
        given = list(tensors((args, kwargs)))
        shapes_only = traits.shapes_only and len(given) == 1
        on_cpu = dict(kwargs)
        if "device" in traits.names and (not given or traits.shapes_only or kwargs.get("device") is not None):
            kwargs["device"], on_cpu["device"] = META, CPU
        args_then, kwargs_then = map_tensors(Tensor.detach, (args, on_cpu))  # `t_` changes its argument's shape
        try:
            # A fill (zeros, a number, draws) changes no shape, and torch's meta kernel for a fill takes a millisecond.
            result = args[0] if traits.overwrites and len(given) == 1 else func(*args, **kwargs)
        except NotImplementedError:  # the shape of the result depends on values, or torch has no meta kernel for it
            result = self._shells(func, args_then, kwargs_then)
        outputs = list(tensors(result))
        created = [None if self._record.knows(t) else t.detach() for t in outputs]
        written = list(written_arguments(func, args=args_then, kwargs=kwargs_then))
        if not written and all(t is None for t in created):
            return result
        if "dtype" in traits.names and not given and kwargs_then.get("dtype") is None:
            kwargs_then["dtype"] = outputs[0].dtype  # at replay, torch's default dtype may be another
        used = [] if shapes_only else [storage(t) for t in tensors((args_then, kwargs_then))]
        anew = traits.overwrites and _fills(written[0]) and used.count(storage(written[0])) == 1
        self._record.add(
            ConstructionOperation(
                run=traits.run,
                args=args_then,
                kwargs=kwargs_then,
                outputs=tuple(created),
                writes=tuple({self._record.learn(t) for t in (*written, *created) if t is not None}),
                reads=tuple(set(used) - ({storage(written[0])} if anew else set())),
                random=traits.random,
                uninitialised=traits.uninitialised,
                shapes_only=shapes_only,
            )
        )
        return result

    def _shells(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation on values to find its result's shapes, and return meta tensors of these shapes."""
        traits = _traits_of(func)
        kwargs = _values(self._record, kwargs) | ({"generator": torch.Generator()} if traits.random else {})
        result = traits.run(*_values(self._record, args), **kwargs)
        for tensor in tensors(result):
            refuse_sparse(tensor, what=f"result of {func} in the model's constructor")
        return map_tensors(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=META), result)


def _values(record: ConstructionRecord, tree: Any) -> Any:
    """Return the tree with values in place of its meta tensors."""
    with without_dispatch_modes():
        found = iter(record.values(list(tensors(tree))))
        return map_tensors(lambda _: next(found), tree)


def _fills(t: Tensor) -> bool:
    """Return whether a tensor covers each element of its storage once."""
    return t.is_contiguous() and t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _index(index: Any) -> Any:
    """Return an index with its lists and arrays as CPU tensors; torch would put them on the meta device."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    if isinstance(index, np.ndarray | range) or (isinstance(index, list) and all(isinstance(i, int) for i in index)):
        return torch.tensor(index if isinstance(index, list) else np.asarray(index))
    return index


class _CpuPretence(TorchFunctionMode):
    """Mode in which recorded meta tensors behave like tensors on the CPU."""

    def __init__(self, record: ConstructionRecord) -> None:
        super().__init__()
        self._record = record
        self._answers: dict[Callable[..., Any], Any] = {
            Tensor.device.__get__: CPU,
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
        }
        self._readers = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._answers and self._record.knows(args[0]):
            return self._skips_to_record(sys._getframe(1)) or self._answers[func]
        if func in self._readers and self._record.knows(args[0]):
            values = _values(self._record, args[0].detach())
            with without_dispatch_modes():
                return func(values, *args[1:], **kwargs)
        if func is Tensor.new_tensor and self._record.knows(args[0]):
            data, kwargs = args[1], {"dtype": args[0].dtype, **kwargs, "device": CPU}
            return torch.tensor(data, **kwargs)  # on the meta device the data would be lost
        if func in {Tensor.__getitem__, Tensor.__setitem__}:
            args = (args[0], _index(args[1]), *args[2:])
        if func is Tensor.__deepcopy__ and self._record.knows(args[0]):
            memo = args[1]
            return memo.setdefault(id(args[0]), args[0].detach().clone().requires_grad_(args[0].requires_grad))
        return func(*args, **kwargs)

    def _skips_to_record(self, asker: FrameType) -> bool:
        """If the caller is torch's truncated normal, record it as one operation and return True.

        The truncated normal reads the numbers that it drew, to redraw those outside of the bounds. To answer, the mode
        would compute the parameter now, before its name, and so its seed, is known. torch has no hook at this point.
        But it first asks whether the tensor is a meta tensor, and skips its work if so."""
        if asker.f_code is not nn.init._no_grad_trunc_normal_.__code__:
            return False
        tensor, *bounds = (asker.f_locals[name] for name in ("tensor", "mean", "std", "a", "b"))
        with torch._C.DisableTorchFunction(), without_dispatch_modes():
            view = tensor.detach()
        self._record.add(
            ConstructionOperation(
                run=nn.init.trunc_normal_,
                args=(view, *bounds),
                kwargs={},
                outputs=(None,),
                writes=(storage(view),),
                reads=() if _fills(view) else (storage(view),),
                random=True,
            )
        )
        return True
