"""Move chunks through memory: read, update, write back.

What of them rests on disk lies in one staging buffer while they are here, as in the file:

    buffer     | master | exp_avg | exp_avg_sq | gradient | master | ...        written back: all but the gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from meshwise.memory.swap_file import SwapTransfer
from meshwise.memory.tiers import Tiers, blocks


@dataclass(frozen=True, eq=False)
class UpdateChunk:
    """Elements that are updated at once, of one dtype.

    slices      what the optimizer updates of them, one after the other
    master      their values, where they rest
    narrow      the parameters as the model has them, to be made of the masters; None where those are the same tensor
    gradient    their gradients, where they rest when they have arrived
    factor      what the gradients have yet to be multiplied by
    """

    slices: tuple[nn.Parameter, ...]
    master: Tensor
    narrow: Tensor | None
    gradient: Callable[[], Tensor]
    factor: Callable[[], float]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk, and what of it rests on disk: `master`, `narrow`, `gradient`, and the optimizer's state by its keys."""

    chunk: UpdateChunk
    rests: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of the blocks on disk."""
        return sum(blocks(rest.nbytes) for rest in self.rests.values())

    @property
    def spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """The slices, each with its elements of the chunk."""
        start = 0
        for parameter in self.chunk.slices:
            yield parameter, slice(start, start + parameter.numel())
            start += parameter.numel()

    def state(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the keys of the state on disk that the optimizer has by now."""
        begun = [optimizer.state.get(parameter, {}).keys() for parameter in self.chunk.slices]
        own = self.rests.keys() - {"master", "narrow", "gradient"}
        return [key for key in self.rests if key in own and any(key in keys for keys in begun)]


class ChunkVisit:
    """Chunks in memory, from the reads on; to be entered, and left whatever happens."""

    def __init__(self, round_: Sequence[StoredChunk], *, optimizer: torch.optim.Optimizer, tiers: Tiers) -> None:
        self.round = round_
        self._optimizer = optimizer
        self._tiers = tiers
        self._buffer: Tensor | None = None
        self._memory: list[dict[str, Tensor]] = [{} for _ in round_]
        self._transfers: list[SwapTransfer] = []
        self._reads: list[SwapTransfer] = []
        self._here = False

    def __enter__(self) -> Self:
        """Wait for a staging buffer, and start to read."""
        self._here = True
        if sum(one.bytes for one in self.round):
            self._buffer = self._tiers.staging.take()
        start = 0
        for one, memory in zip(self.round, self._memory, strict=True):
            there = {"master", "gradient", *one.state(self._optimizer)}
            for name, rest in one.rests.items():
                assert self._buffer is not None
                memory[name] = self._buffer[start : start + blocks(rest.nbytes)]
                start += memory[name].numel()
                if name in there:
                    self._reads.append(self._tiers.read(rest, into=memory[name]))
        return self

    @property
    def bytes(self) -> int:
        """Bytes that the optimizer updates."""
        return sum(one.chunk.master.nbytes for one in self.round)

    @property
    def finite(self) -> bool:
        """True if all gradients are, after `bring`."""
        gradients = [parameter.grad for one in self.round for parameter in one.chunk.slices]
        return all(bool(torch.linalg.vector_norm(each).isfinite()) for each in gradients if each is not None)

    def bring(self) -> None:
        """Let the optimizer see these chunks. Raises TierError when something does not come back."""
        for read in self._reads:
            read.wait()
        for one, memory in zip(self.round, self._memory, strict=True):
            values = {name: _typed(memory[name], like=rest) for name, rest in one.rests.items()}
            gradient = values["gradient"] if "gradient" in values else one.chunk.gradient()
            gradient = gradient.to(self._tiers.updates_on)
            if (factor := one.chunk.factor()) != 1.0:
                gradient.mul_(factor)
            for parameter, span in one.spans:
                if "master" in values:
                    parameter.data = values["master"][span]
                parameter.grad = gradient[span]
                self._bind(parameter, values, span)

    def write(self) -> SwapTransfer:
        """Make the parameters of the masters, and start to write what the update has changed."""
        writes: list[SwapTransfer] = []
        for one, memory in zip(self.round, self._memory, strict=True):
            values = {name: _typed(memory[name], like=rest) for name, rest in one.rests.items()}
            changed = {"master", "narrow", *one.state(self._optimizer)}
            for parameter, span in one.spans:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if key in values and value.data_ptr() != values[key][span].data_ptr():
                        values[key][span].copy_(value)  # the first step has made it
            if one.chunk.narrow is not None:
                narrow = values.get("narrow", one.chunk.narrow)
                # A staging buffer is soon another chunk's.
                narrow.copy_(values.get("master", one.chunk.master), non_blocking="master" not in values)
            writes += [
                self._tiers.write(rest, values=memory[name]) for name, rest in one.rests.items() if name in changed
            ]
        self._transfers = writes
        return SwapTransfer.of(writes)

    def leave(self) -> None:
        """Wait until everything is written back; the buffer is free again when it has been read and written."""
        if not self._here:
            return
        self._here = False
        for one in self.round:
            for parameter, span in one.spans:
                parameter.grad = None
                if "master" in one.rests:
                    parameter.data = one.rests["master"][span]
                self._bind(parameter, one.rests, span)
        self._memory = [{} for _ in self.round]
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            SwapTransfer.of([*self._reads, *self._transfers]).then(lambda: self._tiers.staging.give(buffer))

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _bind(self, parameter: nn.Parameter, values: Mapping[str, Tensor], span: slice) -> None:
        """Let the optimizer find its state of a slice in `values`."""
        state = self._optimizer.state.get(parameter, {})
        for key in values.keys() & state.keys():
            state[key] = values[key][span]


def _typed(memory: Tensor, *, like: Tensor) -> Tensor:
    return memory[: like.nbytes].view(like.dtype)
