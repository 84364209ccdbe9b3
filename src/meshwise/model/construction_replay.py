"""Compute the values of any single tensor of a model from the record of the model's construction.

    | index   operation          writes   reads        what w needs: 0, 3, 4
    |   0     empty()            a                     (1 and 2 were overwritten by 3; u is another tensor)
    |   1     uniform_(a)        a
    |   2     mul_(a, 2)         a        a            w = nn.Parameter(a), u = nn.Parameter(b)
    |   3     normal_(a)         a
    |   4     zero_(a[0])        a        a
    |   5     empty()            b
    |   6     copy_(b, a)        b        a

Only the operations on which the wanted tensors depend run, in order; memory is freed after its last use. So at most
the tensor and the inputs of one operation are in memory.

Every random operation draws from its own generator. The generator's seed is a hash of the model's seed, a tensor's name
and a number. The tensor is the first parameter or buffer that depends on the operation, and the number counts its
operations. So the values of a parameter depend on no other part of the model, no order and no rank. The global
generators stay unchanged."""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base.tensor_tree import map_tensors, tensors

CPU = torch.device("cpu")
"""The device on which values are computed."""
_CHUNK = 1 << 16
CONSTRUCTION = "(construction)"
"""Name that seeds random numbers which the constructor reads before they belong to a named tensor."""


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
    """True if the operation draws random numbers."""

    uninitialised: bool = False
    """True if the results are memory that was never written (`torch.empty`)."""
    shapes_only: bool = False
    """True if the operation reads only the shapes of its tensors (`torch.zeros_like`), which stay meta tensors."""


def storage(t: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    identity: int = t.untyped_storage()._cdata
    return identity


class ConstructionRecord:
    """Record of all tensor operations of one model's construction, in order."""

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
        """Give the random operations behind `wanted` seeds from the tensor's `name`, if they have none yet."""
        for index in self._needed(wanted):
            if self._operations[index].random and index not in self._streams:
                self._streams[index] = f"{name}\0{self._counts[name]}"
                self._counts[name] += 1

    def values(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that the meta tensors `wanted` have at the end of the record, on the CPU.

        An element that was never written is NaN, the largest value of its integer type, or True."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.name_draws(wanted, name=CONSTRUCTION)
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

    def unwritten(self, t: Tensor, *, values: Tensor) -> int:
        """Return how many elements of `values`, the values of `t`, depend on memory that was never written.

        Such elements equal `_poison`: NaN stays NaN in arithmetic. Booleans are not checked."""
        needed = (self._operations[index] for index in self._needed([t]))
        if values.dtype == torch.bool or not any(operation.uninitialised for operation in needed):
            return 0
        parts = values.reshape(-1).split(_CHUNK)  # a mask of the tensor's size would take memory
        if values.is_floating_point() or values.is_complex():
            return sum(int(part.isnan().sum()) for part in parts)
        return sum(int((part == _poison(part.dtype)).sum()) for part in parts)

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
            first = [] if key in self._constants else writers[:1]  # creates the memory that the latest one overwrites
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
            kwargs["generator"] = self._generator(self._streams[index])
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
                    got.fill_(_poison(got.dtype))

    def _generator(self, stream: str) -> torch.Generator:
        # torch's CPU generator keeps 32 bits of its seed. Among 1,000 streams two are equal with a chance of 1e-4.
        digest = hashlib.blake2b(f"{self.seed}\0{stream}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _view(t: Tensor, memory: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """Return the tensor with values that is the same view of its storage as the meta tensor `t`."""
    source = memory[storage(t)]
    view = torch.empty(0, dtype=t.dtype, device=source.device)
    view = view.set_(source, t.storage_offset(), t.size(), t.stride())
    view = view.conj() if t.is_conj() else view
    return torch._neg_view(view) if t.is_neg() else view


def _as_laid_out(was: Tensor, got: Tensor) -> Tensor:
    """Return `got` with the strides of its meta tensor `was`, because recorded views use these strides."""
    if got.stride() == was.stride() and got.storage_offset() == was.storage_offset():
        return got
    return torch.empty_strided(was.size(), was.stride(), dtype=was.dtype, device=CPU).copy_(got)


def _poison(dtype: torch.dtype) -> float | int | bool:
    """Return the value that marks memory never written: NaN, the largest integer, or True."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
