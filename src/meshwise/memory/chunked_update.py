"""Update parameters in chunks, and read the next chunks from their tier meanwhile.

An elementwise optimizer updates any part of its parameters alone: torch's skip those without a gradient. So one
optimizer holds the state of everything, as it does with nothing offloaded, and is run once for each round:

    round 0    read │ update │ write
    round 1         │ read   │ update │ write
    round 2                  │ read   │ update │ write          three staging buffers: one in each column

A round is as many chunks as fit a staging buffer. With nothing offloaded there is one round, of everything.

Rounds run when the gradients of all buckets have arrived (`step`). With `early`, the rounds of a bucket run as soon as
its gradients have, on a separate thread during the backward of the others (`begin`, `submit`, `finish`). An early
update runs before it is known whether the step may be applied; `abandon` returns whether one did.

During its update a chunk of the disk lies in one staging buffer, in the order of the file (`StagedRound`):

    buffer     | master | exp_avg | exp_avg_sq | gradient | master | ...        written back: all but the gradients
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.memory.swap_file import SwapTransfer, TierError, whole_blocks
from meshwise.memory.tiers import Tiers


@dataclass(frozen=True, eq=False)
class UpdateChunk:
    """Elements of one dtype that are updated at once.

    | slices      the optimizer's parameters, one after the other
    | master      the values, on their tier
    | narrow      the parameters in the model's dtype, to be made of the masters; None if the master is the parameter
    | gradient    returns the gradients, on their tier, once they have arrived
    | factor      returns the number that the gradients must be multiplied by
    """

    slices: tuple[nn.Parameter, ...]
    master: Tensor
    narrow: Tensor | None
    gradient: Callable[[], Tensor]
    factor: Callable[[], float]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk, and its tensors on disk: `master`, `narrow`, `gradient`, and the optimizer's state by its keys."""

    chunk: UpdateChunk
    on_disk: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of the blocks on disk."""
        return sum(whole_blocks(tensor.nbytes) for tensor in self.on_disk.values())

    @property
    def spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Each slice, and the part of the chunk that it is."""
        start = 0
        for parameter in self.chunk.slices:
            yield parameter, slice(start, start + parameter.numel())
            start += parameter.numel()

    def state(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the keys of the state on disk that the optimizer has already made."""
        begun = [optimizer.state.get(parameter, {}).keys() for parameter in self.chunk.slices]
        own = self.on_disk.keys() - {"master", "narrow", "gradient"}
        return [key for key in self.on_disk if key in own and any(key in keys for keys in begun)]


class StagedRound:
    """Chunks of one round in memory: read on entering, bound to the optimizer by `bring`, written back."""

    def __init__(self, round_: Sequence[StoredChunk], *, optimizer: torch.optim.Optimizer, tiers: Tiers) -> None:
        self.round = round_
        self._optimizer = optimizer
        self._tiers = tiers
        self._buffer: Tensor | None = None
        self._memory: list[dict[str, Tensor]] = [{} for _ in round_]
        self._values: list[dict[str, Tensor]] = [{} for _ in round_]
        self._transfers: list[SwapTransfer] = []
        self._reads: list[SwapTransfer] = []
        self._is_open = False

    def __enter__(self) -> Self:
        """Wait for a staging buffer, and start to read."""
        self._is_open = True
        if sum(one.bytes for one in self.round):
            self._buffer = self._tiers.staging.take()
        start = 0
        for one, memory, values in zip(self.round, self._memory, self._values, strict=True):
            written = {"master", "gradient", *one.state(self._optimizer)}
            for name, tensor in one.on_disk.items():
                assert self._buffer is not None
                memory[name] = self._buffer[start : start + whole_blocks(tensor.nbytes)]
                values[name] = memory[name][: tensor.nbytes].view(tensor.dtype)
                start += memory[name].numel()
                if name in written:
                    self._reads.append(self._tiers.read(tensor, into=memory[name]))
        return self

    @property
    def bytes(self) -> int:
        """Bytes that the optimizer updates."""
        return sum(one.chunk.master.nbytes for one in self.round)

    @property
    def finite(self) -> bool:
        """True if all gradients are finite; call `bind_values` first."""
        gradients = [parameter.grad for one in self.round for parameter in one.chunk.slices]
        return all(bool(torch.linalg.vector_norm(each).isfinite()) for each in gradients if each is not None)

    def bind_values(self) -> None:
        """Wait for the reads, and bind the values to the optimizer's parameters. Raises TierError if a read failed."""
        for read in self._reads:
            read.wait()
        for one, values in zip(self.round, self._values, strict=True):
            gradient = values["gradient"] if "gradient" in values else one.chunk.gradient()
            gradient = gradient.to(self._tiers.updates_on)
            if (factor := one.chunk.factor()) != 1.0:
                gradient.mul_(factor)
            for parameter, span in one.spans:
                if "master" in values:
                    parameter.data = values["master"][span]
                parameter.grad = gradient[span]
                self._bind(parameter, values, span)

    def write(self) -> Sequence[SwapTransfer]:
        """Copy masters into parameters, and start to write everything that the update has changed."""
        writes: list[SwapTransfer] = []
        for one, memory, values in zip(self.round, self._memory, self._values, strict=True):
            changed = {"master", "narrow", *one.state(self._optimizer)}
            for parameter, span in one.spans:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if key in values and value.data_ptr() != values[key][span].data_ptr():
                        values[key][span].copy_(value)  # made by the first step
            if one.chunk.narrow is not None:
                narrow = values.get("narrow", one.chunk.narrow)
                # A staging buffer is soon another chunk's.
                narrow.copy_(values.get("master", one.chunk.master), non_blocking="master" not in values)
            writes += [
                self._tiers.write(tensor, values=memory[name])
                for name, tensor in one.on_disk.items()
                if name in changed
            ]
        self._transfers = writes
        return writes

    def leave(self) -> None:
        """Bind the tensors on disk to the optimizer again. The buffer is free when its transfers have ended."""
        if not self._is_open:
            return
        self._is_open = False
        for one in self.round:
            for parameter, span in one.spans:
                parameter.grad = None
                if "master" in one.on_disk:
                    parameter.data = one.on_disk["master"][span]
                self._bind(parameter, one.on_disk, span)
        self._memory = self._values = [{} for _ in self.round]
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            SwapTransfer.of([*self._reads, *self._transfers]).then(lambda: self._tiers.staging.give(buffer))

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _bind(self, parameter: nn.Parameter, values: Mapping[str, Tensor], span: slice) -> None:
        """Point the optimizer's state of a slice to `values`."""
        state = self._optimizer.state.get(parameter, {})
        for key in values.keys() & state.keys():
            state[key] = values[key][span]


Round: TypeAlias = Sequence[StoredChunk]
"""Chunks that are updated at once."""


class ChunkedUpdate:
    """Optimizer step over everything that this rank updates, through the tiers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        chunks: Sequence[Sequence[UpdateChunk]],
        tiers: Tiers,
        early: bool = False,
    ) -> None:
        """`chunks`: the chunks of each bucket. Reserves room on the tier of the optimizer's state.

        Raises TierError when there is none.
        """
        self.optimizer = optimizer
        self._tiers = tiers
        self._on_disk: dict[nn.Parameter, dict[str, Tensor]] = {}
        together = chunks if early else [list(itertools.chain(*chunks))]
        self._rounds = {own[0]: list(self._in_rounds(map(self._stored_chunk, own))) for own in together if own}
        self._broken = False
        self._queue = _RoundQueue()
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update") if early else None
        tiers.reserve(max((_bytes(round_) for rounds in self._rounds.values() for round_ in rounds), default=0))

    def step(self, done: Callable[[UpdateChunk], None]) -> None:
        """Update every chunk by its gradient, in the same order on every rank, and call `done` on each.

        Raises TierError when a tier fails. Parameters are then part old, part new until a checkpoint is loaded.
        """
        self.check()
        self._tiers.settle()
        queue = _RoundQueue()
        for rounds in self._rounds.values():
            queue.put(rounds)
        queue.end()
        self._broken = True
        self._update_all(queue, done)
        self._broken = False

    # ---- early -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the thread's work on the gradients of a step. Raises TierError like `check`."""
        self.check()
        assert self._thread is not None
        self._queue = _RoundQueue()
        self._under_way = self._thread.submit(self._update_early, self._queue)

    def submit(self, chunks: Sequence[UpdateChunk], *, ready: Callable[[], object]) -> None:
        """Update the chunks of one bucket on the thread, after `ready` has returned there."""
        self._queue.put(self._rounds[chunks[0]], ready=ready)

    def finish(self) -> None:
        """Wait until every chunk that arrived is updated, and accept the updates. Raises TierError like `step`."""
        assert self._under_way is not None
        self._queue.end()
        running, self._under_way = self._under_way, None
        running.result()
        self._tiers.settle()
        self._broken = False

    def abandon(self) -> bool:
        """End the updates of this step, and return whether some parameters are already updated."""
        if self._under_way is not None:
            self._queue.end()
            running, self._under_way = self._under_way, None
            running.exception()
        return self._broken

    def _update_early(self, queue: "_RoundQueue") -> None:
        try:
            with self._tiers.on_copy_stream():
                self._update_all(queue, lambda _: None)
        except BaseException:
            self._broken = True
            raise

    # ---- updates that ended half way ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise TierError if an update has ended half way and no checkpoint was loaded since."""
        if self.abandon():
            raise TierError(
                "an update ended half way, so parameters and optimizer state are part old and part new; load a "
                "checkpoint to continue"
            )

    def mark_broken(self) -> None:
        """Record that other ranks have updated parameters that this one has not."""
        self._broken = True

    def mark_loaded(self) -> None:
        """Record that a checkpoint was loaded: all parameters are of one step again."""
        self._broken = False

    def close(self) -> None:
        """End the thread."""
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown()

    def zero_state(self, parameter: nn.Parameter, *, key: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros for the optimizer's state of a slice, on its tier."""
        stored = self._on_disk.get(parameter, {}).get(key)
        if stored is not None and stored.dtype == dtype:
            return stored.zero_()
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    # ---- rounds ------------------------------------------------------------------------------------------------

    def _update_all(self, queue: "_RoundQueue", done: Callable[[UpdateChunk], None]) -> None:
        """Update round by round, and read the next round while this one is updated.

        An early update stops at the first gradient that is not finite.
        """
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        writes: list[SwapTransfer] = []
        sound = True
        with ExitStack() as open_rounds:
            ahead: deque[StagedRound] = deque()
            while True:
                while len(ahead) < 2 and (round_ := queue.next(wait=not ahead)) is not None:
                    staged = StagedRound(round_, optimizer=self.optimizer, tiers=self._tiers)
                    ahead.append(open_rounds.enter_context(staged))
                if not ahead:
                    break
                staged = ahead.popleft()
                staged.bind_values()
                sound = sound and (self._thread is None or staged.finite)
                if sound:
                    self._broken = True
                    for group, values in zip(self.optimizer.param_groups, options, strict=True):
                        group.update(values)  # an optimizer may count its steps in the group: rounds are one step
                    began = time.monotonic()
                    self.optimizer.step()
                    self._tiers.record_update(staged.bytes, since=began)
                    writes += staged.write()
                staged.leave()
                for one in staged.round:
                    done(one.chunk)
        for written in writes:
            written.wait()

    def _stored_chunk(self, chunk: UpdateChunk) -> StoredChunk:
        """Return a chunk with its tensors on disk. Room for the optimizer's state is reserved here."""
        gradient = chunk.gradient() if self._tiers.offload.gradients == "disk" else None
        values = {"master": chunk.master, "narrow": chunk.narrow, "gradient": gradient}
        found = {name: value for name, value in values.items() if value is not None and self._tiers.on_disk(value)}
        if self._tiers.offload.optimizer == "disk":
            for key, dtype in self._kept(chunk).items():
                found[key] = self._tiers.empty("optimizer", numel=chunk.master.numel(), dtype=dtype)
        stored = StoredChunk(chunk, found)
        for parameter, span in stored.spans:
            self._on_disk[parameter] = {key: tensor[span] for key, tensor in found.items() if key not in values}
            begun = self.optimizer.state.get(parameter, {})  # Adagrad makes its state when it is built
            begun.update(
                (key, tensor.copy_(begun[key])) for key, tensor in self._on_disk[parameter].items() if key in begun
            )
        return stored

    def _kept(self, chunk: UpdateChunk) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the optimizer's state of a chunk, found by a step over a small parameter."""
        kept: dict[str, torch.dtype] = {}
        for parameter in chunk.slices:
            group = next(
                group for group in self.optimizer.param_groups if any(parameter is member for member in group["params"])
            )
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

    def _in_rounds(self, chunks: Iterable[StoredChunk]) -> Iterator[Round]:
        """Yield rounds of as many chunks as a staging buffer holds, or one round of all when nothing moves."""
        most, round_ = self._tiers.swap.buffer, list[StoredChunk]()
        for one in chunks:
            longer = [*round_, one]
            masters = sum(each.chunk.master.nbytes for each in longer)
            if round_ and self._tiers.chunk_limit is not None and max(_bytes(longer), masters) > most:
                yield round_
                longer = [one]
            round_ = longer
        yield round_


class _RoundQueue:
    """Queue of the rounds of a step, in the order of their update; another thread may fill it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Sequence[Round], Callable[[], object]] | None] = SimpleQueue()
        self._ready: deque[Round] = deque()
        self._is_over = False

    def put(self, rounds: Sequence[Round], *, ready: Callable[[], object] = lambda: None) -> None:
        """Queue `rounds`, to be updated once `ready` returns."""
        self._queue.put((rounds, ready))

    def end(self) -> None:
        """Announce that no more rounds follow."""
        self._queue.put(None)

    def next(self, *, wait: bool) -> Round | None:
        """Return the next round, or None after the last one. Without `wait`, also None when none has arrived yet."""
        while not self._ready and not self._is_over:
            try:
                entry = self._queue.get(block=wait)
            except Empty:
                return None
            if entry is None:
                self._is_over = True
                break
            rounds, ready = entry
            ready()
            self._ready.extend(rounds)
        return self._ready.popleft() if self._ready else None


def _bytes(round_: Round) -> int:
    return sum(one.bytes for one in round_)
