"""Try out whether ranks can share what lies between the matrices of a pair.

Sizes and registration order show which matrices form a pair, but not what the forward does between them. A softmax over
the hidden features needs all of them, and a bias by head number needs to know which heads they are. So it is tried out.
A copy of the module, whose first matrices return random numbers, runs with all features and with one rank's. Its second
matrix must read this rank's part of the same values, and nothing else in the output may depend on the features.

    first matrices give   N        ── module ──►  the second reads  R         returns  Y
    and of one rank       N[part]  ── module ──►                    R[part]            Y
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.batch_norm_classes import BatchNorm
from meshwise.layout.layout import DimSplit
from meshwise.tensor.core.part import Part
from meshwise.tensor.detect.attention_heads import set_count
from meshwise.tensor.detect.matrix_modules import matrices

Place: TypeAlias = tuple[int, int]
_TOKENS = 3
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OTHERWISE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""What a module raises that takes something else."""


@dataclass(frozen=True)
class SplitTrial:
    """A module that reads the hidden states, and how ranks would share out what lies between its matrices.

    | firsts   its children that open the pair, with how many features each gives
    | second   its child that closes the pair; None: another module has that, and reads what this one returns
    | read     how what the second reads is cut
    | sizes    of that, and of the hidden states
    | parts    by name: of the module itself, "", and of what it holds
    """

    module: nn.Module
    firsts: Mapping[str, int]
    second: str | None
    read: DimSplit
    sizes: tuple[int, int]
    parts: Mapping[str, Part]

    def verdict(self, *, ranks: int) -> bool | None:
        """Return whether the first and last of `ranks` ranks compute their parts; None if the module cannot be tried.
        None for a module whose forward takes something else, or is not the same every time.
        """
        whole = self._run((0, 1))
        if whole is None or whole[0].size(-1) != self.sizes[0]:
            return None
        read, *others = whole
        places = [(0, ranks), (ranks - 1, ranks)]
        if all(_same((_cut(read, self.read, at=at), *others), self._run(at)) for at in places):
            return True
        return False if _same(whole, self._run((0, 1))) else None

    @property
    def key(self) -> Hashable:
        """Equal for trials with the same result: modules of one kind, such as the blocks of a model."""
        made = tuple((name, type(inner), _state(inner)) for name, inner in self.module.named_modules())
        return made, tuple(self.firsts.items()), self.second, self.read, self.sizes, tuple(self.parts.items())

    def _run(self, at: Place) -> tuple[Tensor, ...] | None:
        """Return the input of the second matrix, the output and the input of the first ones, or None if it cannot
        run.
        """
        seeds = itertools.count()

        def numbers(*shape: int) -> Tensor:
            return _numbers(shape, seed=next(seeds)).clone()

        features, width = self.sizes
        given = {
            name: _cut(numbers(1, _TOKENS, size), self.parts[name].cut, at=at) for name, size in self.firsts.items()
        }
        closing, x = numbers(1, _TOKENS, width), numbers(1, _TOKENS, width)
        if grain := self.parts[""].narrows:
            x = x[..., : _share(features, DimSplit(grain=grain), at=at)]
        takes = _Takes(closing)
        gives: dict[str | None, _Takes] = {name: _Takes(part) for name, part in given.items()}
        try:
            asked = self._copy(gives | {self.second: takes})
            _fill(asked, numbers)
            self._cut_inside(asked, at=at)
            with torch.no_grad():
                answer = type(asked).forward(asked, x)
        except _OTHERWISE:
            return None
        returned = answer[0] if isinstance(answer, tuple) else answer
        read = () if grain else tuple(matrix.read for matrix in gives.values() if matrix.read is not None)
        if self.second is None:
            return (returned, closing, *read) if isinstance(returned, Tensor) else None
        return (takes.read, returned, *read) if takes.read is not None and isinstance(returned, Tensor) else None

    def _copy(self, stubs: Mapping[str | None, _Takes]) -> nn.Module:
        """Return the module with these children, in eval mode. No matrix is copied: others give nothing."""
        asked, inside = copy.copy(self.module), dict(self.module.named_modules())
        memo = {id(inside[matrix.name]): _Nothing(matrix.outputs) for matrix in matrices(self.module, name="")}
        asked._modules = {
            name: stubs[name] if name in stubs else copy.deepcopy(child, memo)
            for name, child in self.module._modules.items()
        }
        asked._parameters = dict(self.module._parameters)
        asked._buffers = {name: copy.deepcopy(buffer) for name, buffer in self.module._buffers.items()}
        return asked.eval()

    def _cut_inside(self, asked: nn.Module, *, at: Place) -> None:
        """Give what lies between the matrices as a rank has it. Statistics that are shared out are left out."""
        for holder in list(asked.modules()):
            for name, child in holder.named_children():
                if isinstance(child, BatchNorm):
                    setattr(holder, name, nn.Identity())
        own = self.parts[""]
        for attribute, grain in (*own.counts, *((name, 1) for name in own.key_counts)):
            count = operator.attrgetter(attribute)(asked)
            shares = [
                _share(size, DimSplit(grain=grain), at=at) for size in (count if isinstance(count, tuple) else (count,))
            ]
            set_count(asked, attribute=attribute, count=tuple(shares) if isinstance(count, tuple) else shares[0])
        for name, part in self.parts.items():
            holder_name, _, last = name.rpartition(".")
            holder = asked.get_submodule(holder_name)
            if part.role == "norm" and name:
                setattr(holder, last, nn.Identity())
            elif part.role == "inner" and last in holder._modules:
                table = holder.get_submodule(last)
                table._parameters = {"weight": _cut_parameter(table.get_parameter("weight"), part, at=at)}
            elif part.role == "inner":
                holder._parameters[last] = _cut_parameter(holder.get_parameter(last), part, at=at)


class _Takes(nn.Module):
    """A matrix that gives these numbers, whatever it reads, and remembers that."""

    read: Tensor | None = None

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        self.read = x.clone()
        return self.numbers.clone()


class _Nothing(nn.Module):
    """A matrix of zeros."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.outputs)


@functools.lru_cache(maxsize=32)
def _numbers(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Random numbers: to draw them anew for each block of a large model takes longer than all else that is tried."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _fill(module: nn.Module, numbers: Callable[..., Tensor]) -> None:
    """Random numbers for all parameters, which may be zeros or on the meta device; the rest in float64, on the CPU."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = nn.Parameter(numbers(*parameter.shape), requires_grad=False)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to("cpu", torch.float64 if buffer.is_floating_point() else None)


def _state(module: nn.Module) -> tuple[Hashable, ...]:
    """Return a key of a module's state: plain values, sums of buffers, and object identities."""
    kept = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    buffers = [(name, x) for name, x in module._buffers.items() if x is not None]
    return (
        *((name, value if _is_plain(value) else id(value)) for name, value in kept),
        *((name, x.shape, None if x.is_meta else float(x.double().sum())) for name, x in buffers),
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _share(size: int, cut: DimSplit, *, at: Place) -> int:
    return sum(stop - start for start, stop in cut.spans(size, places=[at]))


def _cut(x: Tensor, cut: DimSplit, *, at: Place, dim: int = -1) -> Tensor:
    """Return a rank's part of a tensor along a dim."""
    spans = cut.spans(x.size(dim), places=[at])
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)


def _cut_parameter(parameter: Tensor, part: Part, *, at: Place) -> nn.Parameter:
    dim = -1 if part.dim is None else part.dim
    return nn.Parameter(_cut(parameter, part.cut, at=at, dim=dim), requires_grad=False)


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...] | None) -> bool:
    return (
        other is not None
        and len(one) == len(other)
        and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(one, other, strict=True)
        )
    )
