"""Update parameters in chunks, while the next chunks are read from their tier.

Only the chunks of a round have gradients, and torch's optimizers skip parameters without one. So one elementwise
optimizer holds the state of all parameters, as without offloading, and steps once per round.
docs/memory.md has a picture of the rounds ("The update"): staging buffers are read, updated and written in turn.

`ChunkedUpdate.step` runs all rounds, when the gradients of all buckets have been reduced.

During the update, the disk tensors of a round's chunks lie in one staging buffer, chunk by chunk (`StagedRound`):

    buffer     | master | gradient | exp_avg | exp_avg_sq | master | ...        written back: all but the gradients"""

import copy
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meshwise.memory.swap_file import SwapTransfer, TierError, whole_blocks
from meshwise.memory.tiers import Tiers


@dataclass(frozen=True, eq=False)
class UpdateChunk:
    """Elements of one dtype of a bucket that are updated together, as flat tensors.

    | slices      the optimizer's parameters, in the order of their elements; together they are the whole chunk. Slices
    |             with `requires_grad` off are not updated
    | master      the unrounded values, on their tier
    | narrow      the parameters in the model's dtype, rounded masters; None if the master is the parameter itself
    | gradient    returns the reduced gradients, on their tier; called when the gradients are ready
    | factor      returns the factor with which gradients on disk must still be multiplied (clipping, the loss's count)
    | on_disk     tensors on disk: `master`, `narrow`, `gradient`, and keys of the optimizer's state. `ChunkedUpdate`
    |             adds them"""

    slices: list[nn.Parameter]
    master: Tensor
    narrow: Tensor | None
    gradient: Callable[[], Tensor]
    factor: Callable[[], float]
    on_disk: dict[str, Tensor] = field(default_factory=dict)

    @property
    def spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Each parameter of the optimizer, with the range of the chunk's elements that it covers."""
        borders = accumulate((parameter.numel() for parameter in self.slices), initial=0)
        return ((parameter, slice(*span)) for parameter, span in zip(self.slices, pairwise(borders), strict=True))

    def state_keys(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the state keys of `on_disk` that the optimizer has already; after its first step, it has all."""
        begun = [optimizer.state.get(parameter, {}).keys() for parameter in self.slices]
        return [key for key in self.on_disk if any(key in keys for keys in begun)]


class StagedRound:
    """One round of chunks in a staging buffer. Call `bind_values`, the optimizer's step, `write`, `release` in turn."""

    def __init__(self, round_: Sequence[UpdateChunk], *, optimizer: torch.optim.Optimizer, tiers: Tiers) -> None:
        """Wait for a staging buffer, and start to read the masters, gradients and optimizer state on disk."""
        self.round = round_
        self._optimizer = optimizer
        self._tiers = tiers
        self._buffer = tiers.staging.take(tiers.staging_size) if _bytes(round_) else None
        self._memory: list[dict[str, Tensor]] = [{} for _ in round_]
        self._values: list[dict[str, Tensor]] = [{} for _ in round_]
        self._reads: list[SwapTransfer] = []
        self._writes: list[SwapTransfer] = []
        start = 0
        for one, memory, values in zip(round_, self._memory, self._values, strict=True):
            written = {"master", "gradient", *one.state_keys(optimizer)}
            for name, tensor in one.on_disk.items():
                assert self._buffer is not None
                memory[name] = self._buffer[start : start + whole_blocks(tensor.nbytes)]
                values[name] = memory[name][: tensor.nbytes].view(tensor.dtype)
                start += memory[name].numel()
                if name in written:
                    self._reads.append(tiers.read(tensor, into=memory[name]))

    def bind_values(self) -> None:
        """Wait for the reads; then give the optimizer masters, gradients (times their factor) and state in memory.

        Raises TierError if a read failed."""
        for read in self._reads:
            read.wait()
        for one, values in zip(self.round, self._values, strict=True):
            gradient = values["gradient"] if "gradient" in values else one.gradient()
            gradient = gradient.to(self._tiers.updates_on)
            if (factor := one.factor()) != 1.0:
                gradient.mul_(factor)
            for parameter, span in one.spans:
                if "master" in values:
                    parameter.data = values["master"][span]
                parameter.grad = gradient[span] if parameter.requires_grad else None
                self._bind(parameter, values, span)

    def write(self) -> Sequence[SwapTransfer]:
        """Round the masters to parameters, start to write the changed tensors back to disk, and return the writes."""
        for one, memory, values in zip(self.round, self._memory, self._values, strict=True):
            changed = {"master", "narrow", *one.state_keys(self._optimizer)}
            for parameter, span in one.spans:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if key in values and value.data_ptr() != values[key][span].data_ptr():
                        values[key][span].copy_(value)  # the first step made a new tensor
            if one.narrow is not None:
                narrow = values.get("narrow", one.narrow)
                # From a staging buffer, copy at once: it will soon hold another chunk.
                narrow.copy_(values.get("master", one.master), non_blocking="master" not in values)
            self._writes += [
                self._tiers.write(tensor, values=memory[name])
                for name, tensor in one.on_disk.items()
                if name in changed
            ]
        return self._writes

    def release(self) -> None:
        """Give the optimizer its tensors on disk again, drop the gradients, and free the buffer when it is idle."""
        for one in self.round:
            for parameter, span in one.spans:
                parameter.grad = None
                if "master" in one.on_disk:
                    parameter.data = one.on_disk["master"][span]
                self._bind(parameter, one.on_disk, span)
        self._memory = self._values = [{} for _ in self.round]
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            SwapTransfer.of([*self._reads, *self._writes]).then(lambda: self._tiers.staging.give(buffer))

    def _bind(self, parameter: nn.Parameter, values: Mapping[str, Tensor], span: slice) -> None:
        """Let the optimizer's state of `parameter` be the part `span` of `values`, by key."""
        state = self._optimizer.state.get(parameter, {})
        for key in values.keys() & state.keys():
            state[key] = values[key][span]


Round: TypeAlias = Sequence[UpdateChunk]
"""Chunks that one step of the optimizer updates together."""


class ChunkedUpdate:
    """Optimizer step over all chunks that this rank updates, with their tensors on any tier."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, chunks: Iterable[UpdateChunk], tiers: Tiers) -> None:
        """Reserve room for the optimizer's state on its tier. Raises TierError if the disk has no room."""
        self.optimizer = optimizer
        self._tiers = tiers
        self._on_disk: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._rounds = list(self._in_rounds(map(self._stored, chunks)))
        self.broken = False
        """True if parameters may belong to different steps: `check` raises, until a checkpoint is loaded."""
        tiers.staging_size = max(tiers.staging_size, *map(_bytes, self._rounds))
        optimizer.register_step_pre_hook(lambda *_: self._refuse_other_steps())

    def step(self, done: Callable[[UpdateChunk], None]) -> None:
        """Update every chunk by its gradient, in the same order on every rank; then call `done` for the chunk.

        Raises TierError if a tier fails. Then some parameters are updated: a checkpoint must be loaded (`check`)."""
        self.check()
        self._tiers.settle()
        self.broken = True
        self._update_all(done)
        self.broken = False

    def check(self) -> None:
        """Raise TierError if an update has ended half way since the last load."""
        if self.broken:
            raise TierError(
                "an update ended half way, so parameters and optimizer state are part old and part new; load a "
                "checkpoint to continue"
            )

    def _refuse_other_steps(self) -> None:
        if not self.broken:
            raise RuntimeError(
                "the script called trainer.optimizer.step(), which has no gradients to apply; remove the call, because "
                "trainer.step(batch), or step.backward(loss) and step.update() in an open step, update the parameters"
            )

    def cut(self, parts: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> None:
        """Replace slices by their parts (as `Bucket.cut` returns them) in the optimizer, and divide their state."""
        for group in self.optimizer.param_groups if parts else ():
            group["params"][:] = [part for whole in group["params"] for part in parts.get(whole, (whole,))]
        for whole, own in parts.items():
            state, sizes = self.optimizer.state.pop(whole, {}), [part.numel() for part in own]
            on_disk = {key: tensor.split(sizes) for key, tensor in self._on_disk.pop(whole, {}).items()}
            for number, part in enumerate(own):
                self._on_disk[part] = {key: tensors[number] for key, tensors in on_disk.items()}
                for key, value in state.items():
                    is_whole = isinstance(value, Tensor) and value.shape == whole.shape
                    self.optimizer.state[part][key] = value.split(sizes)[number] if is_whole else copy.deepcopy(value)

    def zero_state(self, parameter: nn.Parameter, *, key: str, dtype: torch.dtype) -> Tensor:
        """Return zeros for the optimizer's state `key` of a parameter; if it is on disk, the reserved tensor itself."""
        stored = self._on_disk.get(parameter, {}).get(key)
        if stored is not None and stored.dtype == dtype:
            return stored.zero_()
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    # ---- rounds ------------------------------------------------------------------------------------------------

    def _update_all(self, done: Callable[[UpdateChunk], None]) -> None:
        """Update round by round, read the next round meanwhile, and wait for all writes."""
        groups = self.optimizer.param_groups
        for group in groups:
            if group.get("fused") and group.get("momentum"):  # torch's fused SGD needs momenta of all slices or of none
                group["fused"] = len({bool(self.optimizer.state.get(each)) for each in group["params"]}) < 2
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        writes: list[SwapTransfer] = []
        staged_rounds: deque[StagedRound] = deque()
        try:
            for round_ in (*self._rounds, None):
                if round_ is not None:
                    staged_rounds.append(StagedRound(round_, optimizer=self.optimizer, tiers=self._tiers))
                if len(staged_rounds) < (1 if round_ is None else 2):
                    continue
                staged = staged_rounds[0]
                staged.bind_values()
                for group, values in zip(groups, options, strict=True):
                    group.update(values)  # an optimizer may count steps in the group, but all rounds are one step
                began = time.monotonic()
                self.optimizer.step()
                self._tiers.record_update(sum(one.master.nbytes for one in staged.round), since=began)
                writes += staged.write()
                staged_rounds.popleft().release()
                for one in staged.round:
                    done(one)
        finally:
            for staged in staged_rounds:
                staged.release()
        for written in writes:
            written.wait()

    def _stored(self, chunk: UpdateChunk) -> UpdateChunk:
        """Return the chunk after adding its tensors on disk; reserve room there for its state of the optimizer."""
        gradient = chunk.gradient() if self._tiers.offload.gradients == "disk" else None
        values = {"master": chunk.master, "narrow": chunk.narrow, "gradient": gradient}
        stored = ((name, value) for name, value in values.items() if value is not None and self._tiers.on_disk(value))
        chunk.on_disk.update(stored)
        if self._tiers.offload.optimizer == "disk":
            for key, dtype in self._kept(chunk).items():
                chunk.on_disk[key] = self._tiers.empty("optimizer", numel=chunk.master.numel(), dtype=dtype)
        for parameter, span in chunk.spans:
            self._on_disk[parameter] = {key: x[span] for key, x in chunk.on_disk.items() if key not in values}
            begun = self.optimizer.state.get(parameter, {})  # Adagrad makes its state when it is built
            begun.update((key, x.copy_(begun[key])) for key, x in self._on_disk[parameter].items() if key in begun)
        return chunk

    def _kept(self, chunk: UpdateChunk) -> Mapping[str, torch.dtype]:
        """Return the dtype of each elementwise state of the optimizer, by key, from a step over a small parameter."""
        kept: dict[str, torch.dtype] = {}
        groups = {member: group for group in self.optimizer.param_groups for member in group["params"]}
        for parameter in chunk.slices:
            small = nn.Parameter(torch.zeros(16, dtype=parameter.dtype))
            small.grad = torch.zeros_like(small)
            trial = object.__new__(type(self.optimizer))
            vars(trial).update(vars(self.optimizer), state=defaultdict(dict))
            trial.param_groups = [{**groups[parameter], "params": [small]}]
            for key, value in self.optimizer.state.get(parameter, {}).items():  # of Adagrad in torch 2.11
                trial.state[small][key] = small.detach().to(value.dtype) if value.dim() else value.clone()
            trial.step()
            state = trial.state[small].items()
            kept |= {key: x.dtype for key, x in state if isinstance(x, Tensor) and x.shape == small.shape}
        return kept

    def _in_rounds(self, chunks: Iterable[UpdateChunk]) -> Iterator[Round]:
        """Yield rounds of as many chunks as a staging buffer holds; if nothing is offloaded, one round with all."""
        most, round_ = self._tiers.swap.buffer, list[UpdateChunk]()
        for one in chunks:
            longer = [*round_, one]
            masters = sum(each.master.nbytes for each in longer)
            if round_ and self._tiers.chunk_limit is not None and max(_bytes(longer), masters) > most:
                yield round_
                longer = [one]
            round_ = longer
        yield round_


def _bytes(round_: Round) -> int:
    """Return the bytes of the round's tensors on disk, each rounded up to whole blocks of the file."""
    return sum(whole_blocks(tensor.nbytes) for one in round_ for tensor in one.on_disk.values())
