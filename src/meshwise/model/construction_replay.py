"""The record of a model's construction, and the values of any one tensor from it.

    | index   operation          writes   reads        what w needs: 0, 3, 4
    |   0     empty()            a                     (1 and 2 were overwritten by 3; u is another tensor)
    |   1     uniform_(a)        a
    |   2     mul_(a, 2)         a        a            w = nn.Parameter(a), u = nn.Parameter(b)
    |   3     normal_(a)         a
    |   4     zero_(a[0])        a        a
    |   5     empty()            b
    |   6     copy_(b, a)        b        a

Values are computed by running, in order, only the operations that the wanted tensors depend on; memory is freed after
its last use. So at most the tensor and the inputs of one operation are held.

Every random operation draws from its own sequence. Its seed is made of the model's seed, the name of the first
parameter or buffer that depends on it, and its number among the random operations of that one. So the values of a
parameter depend on nothing else in the model, on no order and on no rank, and the global generators are not touched.
"""

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
_CHUNK = 1 << 16
CONSTRUCTION = "(construction)"
"""The stream of random numbers that the constructor looked at before they had become part of a named tensor."""


@dataclass(frozen=True)
class ConstructionOperation:
    """One operation of the constructor. The tensors in it are meta tensors: a storage and a view of it."""

    run: Callable[..., Any]
    """The operation itself; one that draws random numbers takes a `generator`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    outputs: tuple[Tensor | None, ...]
    """Its results; None for one that shares a storage with an argument."""
    writes: tuple[int, ...]
    """Storages it changes or creates."""
    reads: tuple[int, ...]
    """Storages whose earlier values matter to it."""
    random: bool = False

    uninitialised: bool = False
    """Whether its results are memory that was never written (`torch.empty`)."""
    shapes_only: bool = False
    """Whether it needs no values of its tensors (`torch.zeros_like`): they stay meta tensors."""


def storage(t: Tensor) -> int:
    """Return the identity of the memory a tensor looks at."""
    identity: int = t.untyped_storage()._cdata
    return identity


class ConstructionRecord:
    """All operations of one construction, in order."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self._operations: list[ConstructionOperation] = []
        self._writers: dict[int, list[int]] = {}
        self._constants: dict[int, Tensor] = {}  # their bytes
        self._known: dict[int, torch.UntypedStorage] = {}  # held, so that no identity is used twice
        self._streams: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def knows(self, t: Tensor) -> bool:
        """Return whether the tensor's memory was seen during the construction."""
        return storage(t) in self._known

    def learn(self, t: Tensor) -> int:
        """Make a meta tensor's memory known and return its identity."""
        self._known.setdefault(storage(t), t.untyped_storage())
        return storage(t)

    def learn_constant(self, t: Tensor, *, real: Tensor) -> None:
        """Make a meta tensor's memory known as standing for the bytes of a real one."""
        self._constants[self.learn(t)] = real

    def add(self, operation: ConstructionOperation) -> None:
        """Append an operation; all tensors in it must be known."""
        for key in operation.writes:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def settle(self, wanted: Sequence[Tensor], *, name: str) -> None:
        """Give the random operations that `wanted` depends on, and that have no stream yet, streams of this name."""
        for index in self._needed(wanted):
            if self._operations[index].random and index not in self._streams:
                self._streams[index] = f"{name}\0{self._counts[name]}"
                self._counts[name] += 1

    def values(self, wanted: Sequence[Tensor], *, poison: bool = True) -> list[Tensor]:
        """Return the real values, on the CPU, of meta tensors as they are at the end of the record.

        Memory that was never written reads as NaN (the largest value of an integer type), or as zero without `poison`.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.settle(wanted, name=CONSTRUCTION)
            indices = self._needed(wanted)
            memory = self._start(indices, wanted)
            kept = {storage(t) for t in wanted}
            last = {key: i for i in indices for op in [self._operations[i]] for key in (*op.reads, *op.writes)}
            for index in indices:
                operation = self._operations[index]
                self._run(index, memory, poison=poison)
                for key in {*operation.reads, *operation.writes} - kept:
                    if last[key] == index:
                        del memory[key]
            return [_view(t, memory) for t in wanted]

    def unwritten(self, t: Tensor, *, values: Tensor) -> int:
        """Return the number of elements of `values`, the values of `t`, that depend on memory never written.

        NaN spreads through arithmetic, so floating-point values without NaN are free of it. Otherwise the values are
        computed again with other poison: what differs depends on it, and what does not was meant (a mask of NaN).
        """
        operations = [self._operations[index] for index in self._needed([t])]
        poisoned = [out for op in operations if op.uninitialised for out in op.outputs if out is not None]
        if not poisoned:
            return 0
        if all(x.is_floating_point() or x.is_complex() for x in (values, *poisoned)) and not _has_nan(values):
            return 0
        other = self.values([t], poison=False)[0]
        return int((~((values == other) | (values.isnan() & other.isnan()))).sum())

    def is_blank(self, t: Tensor) -> bool:
        """Return whether all that was ever done with the memory of a tensor was to take it."""
        needed = [self._operations[index] for index in self._needed([t])]
        return bool(needed) and all(operation.uninitialised for operation in needed)

    def _needed(self, wanted: Sequence[Tensor]) -> list[int]:
        """Return the operations that `wanted` depends on, in order."""
        found: set[int] = set()
        open_ = [(storage(t), len(self._operations)) for t in wanted]
        while open_:
            key, before = open_.pop()
            writers = self._writers.get(key, [])
            latest = bisect_left(writers, before) - 1
            if latest < 0:
                continue  # a constant nobody wrote to
            first = [] if key in self._constants else writers[:1]  # creates the memory that the latest overwrites
            for index in {*first, writers[latest]} - found:
                found.add(index)
                open_ += [(read, index) for read in self._operations[index].reads]
        return sorted(found)

    def _start(self, indices: Sequence[int], wanted: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the constants that take part; those that will be written, or handed out, as copies."""
        operations = [self._operations[index] for index in indices]
        changed = {key for operation in operations for key in operation.writes} | {storage(t) for t in wanted}
        used = changed | {key for operation in operations for key in operation.reads}
        return {
            key: constant.to(CPU, copy=key in changed).untyped_storage()
            for key, constant in self._constants.items()
            if key in used
        }

    def _run(self, index: int, memory: dict[int, torch.UntypedStorage], *, poison: bool) -> None:
        operation = self._operations[index]
        args, kwargs = operation.args, dict(operation.kwargs)
        if not operation.shapes_only:
            args, kwargs = map_tensors(lambda t: _view(t, memory), (args, kwargs))
        if operation.random:
            kwargs["generator"] = self._generator(self._streams[index])
        results = list(tensors(operation.run(*args, **kwargs)))
        created = [(was, got) for was, got in zip(operation.outputs, results, strict=True) if was is not None]
        if any(was.dtype != got.dtype for was, got in created):
            # The result's type came from integers and torch's default dtype, which was another one at construction.
            dtype = next(was.dtype for was, _ in created)
            args = map_tensors(lambda t: t if t.dtype == torch.bool or t.is_floating_point() else t.to(dtype), args)
            results = [t.to(dtype) for t in tensors(operation.run(*args, **kwargs))]
        for was, got in zip(operation.outputs, results, strict=True):
            if was is not None:
                memory[storage(was)] = _as_laid_out(was, got).untyped_storage()
                if operation.uninitialised:
                    got.fill_(_poison(got.dtype) if poison else 0)

    def _generator(self, stream: str) -> torch.Generator:
        # torch's CPU generator keeps 32 bits of its seed: of 1,000 streams, some two are equal with a chance of 1e-4.
        digest = hashlib.blake2b(f"{self.seed}\0{stream}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _view(t: Tensor, memory: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """Return the real tensor that looks at its memory as the meta tensor `t` looks at its own."""
    source = memory[storage(t)]
    real = torch.empty(0, dtype=t.dtype, device=source.device)
    real = real.set_(source, t.storage_offset(), t.size(), t.stride())
    real = real.conj() if t.is_conj() else real
    return torch._neg_view(real) if t.is_neg() else real


def _as_laid_out(was: Tensor, got: Tensor) -> Tensor:
    """`got` in the layout that its meta tensor foretold, which views of it rely on."""
    if got.stride() == was.stride() and got.storage_offset() == was.storage_offset():
        return got
    return torch.empty_strided(was.size(), was.stride(), dtype=was.dtype, device=CPU).copy_(got)


def _has_nan(t: Tensor) -> bool:
    """Return whether an element is NaN, without a mask of the tensor's size."""
    flat = t.reshape(-1)
    return any(bool(flat[start : start + _CHUNK].isnan().any()) for start in range(0, flat.numel(), _CHUNK))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
