"""The update of what rests elsewhere, some chunks at a time: the next are read while these are updated.

An elementwise optimizer updates any part of its parameters alone: torch's skip those without a gradient. So one
optimizer holds the state of everything, as it does with nothing offloaded, and is run once for each round:

    round 0    read │ update │ write
    round 1         │ read   │ update │ write
    round 2                  │ read   │ update │ write          three staging buffers: one in each column

A round is as many chunks as fit a staging buffer. With nothing elsewhere there is one round, of everything.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.memory.swap import Moved, TierError, Transfer
from meshwise.memory.tiers import Tiers
from meshwise.memory.visit import Chunk, Resting, Visit


class Update:
    """One optimizer step over everything that this rank updates, through the tiers."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, chunks: Sequence[Chunk], tiers: Tiers) -> None:
        """Reserves where the optimizer's state rests. Raises TierError when there is no room for it."""
        self.optimizer = optimizer
        self._tiers = tiers
        self._rests: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._rounds = list(self._in_rounds([(chunk, self._resting(chunk)) for chunk in chunks]))
        self._broken = False
        tiers.reserve(max((_bytes(round_) for round_ in self._rounds), default=0))

    def step(self, done: Callable[[Chunk], None]) -> None:
        """Update every chunk by its gradient, and tell when it is done: in order, on every rank alike.

        Raises TierError when a tier fails; what is updated is then part old and part new, and stays so until a load.
        """
        self.check()
        self._tiers.settle()
        self._broken = True
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        writes: list[Transfer] = []
        with ExitStack() as open_visits:
            enter = lambda round_: open_visits.enter_context(  # noqa: E731
                Visit([resting for _, resting in round_], optimizer=self.optimizer, tiers=self._tiers)
            )
            ahead = [enter(self._rounds[0])]
            for number, round_ in enumerate(self._rounds):
                ahead += [enter(later) for later in self._rounds[number + 1 : number + 2]]
                visit = ahead.pop(0)
                visit.bring()
                for group, values in zip(self._groups, groups, strict=True):
                    group.update(values)  # an optimizer that counts its steps there has to count one
                begun = time.monotonic()
                self.optimizer.step()
                if self._tiers.file is not None:
                    self._tiers.file.moved.append(Moved("update", _bytes(round_), begun, time.monotonic()))
                writes.append(visit.write())
                visit.leave()
                for chunk, _ in round_:
                    done(chunk)
        for written in writes:
            written.wait()
        self._broken = False

    def check(self) -> None:
        """Raise TierError when an update came to nothing half way."""
        if self._broken:
            raise TierError(
                "an update ended half way, so parameters and optimizer state are part old and part new; load a "
                "checkpoint to go on"
            )

    def mended(self) -> None:
        """Everything has been loaded anew."""
        self._broken = False

    def zero_state(self, parameter: nn.Parameter, *, key: str, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros for the optimizer's state of a slice, where that rests."""
        rest = self._rests.get(parameter, {}).get(key)
        if rest is not None and rest.dtype == dtype:
            return rest.zero_()
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _resting(self, chunk: Chunk) -> Resting:
        """What of a chunk rests on disk; room for the optimizer's state is reserved here."""
        gradient = chunk.gradient() if self._tiers.offload.gradients == "disk" else None
        rests = {"master": chunk.master, "narrow": chunk.narrow, "gradient": gradient}
        found = {name: rest for name, rest in rests.items() if rest is not None and self._tiers.on_disk(rest)}
        if self._tiers.offload.optimizer == "disk":
            for key, dtype in self._kept(chunk).items():
                found[key] = self._tiers.empty("optimizer", numel=chunk.master.numel(), dtype=dtype)
        resting = Resting(chunk, found)
        for parameter, span in resting.spans:
            self._rests[parameter] = {key: rest[span] for key, rest in found.items() if key not in rests}
        return resting

    def _kept(self, chunk: Chunk) -> Mapping[str, torch.dtype]:
        """The tensors that the optimizer keeps of a chunk: found out by a step of a small one with its options."""
        kept: dict[str, torch.dtype] = {}
        for parameter in chunk.slices:
            group = next(group for group in self._groups if any(parameter is member for member in group["params"]))
            small = nn.Parameter(torch.zeros(16, dtype=parameter.dtype))
            small.grad = torch.zeros_like(small)
            trial = object.__new__(type(self.optimizer))
            vars(trial).update(vars(self.optimizer), state=defaultdict(dict))
            trial.param_groups = [{**group, "params": [small]}]
            trial.step()
            state = trial.state[small].items()
            kept |= {
                key: value.dtype for key, value in state if isinstance(value, Tensor) and value.shape == small.shape
            }
        return kept

    def _in_rounds(self, chunks: Sequence[tuple[Chunk, Resting]]) -> Iterator[list[tuple[Chunk, Resting]]]:
        """As many chunks together as a staging buffer holds; all of them when nothing moves."""
        most, round_ = self._tiers.swap.buffer, list(chunks[:1])
        for chunk in chunks[1:]:
            masters = sum(one.master.nbytes for one, _ in [*round_, chunk])
            if self._tiers.most is None or max(_bytes([*round_, chunk]), masters) <= most:
                round_.append(chunk)
            else:
                yield round_
                round_ = [chunk]
        yield round_


def _bytes(round_: Sequence[tuple[Chunk, Resting]]) -> int:
    return sum(resting.bytes for _, resting in round_)
