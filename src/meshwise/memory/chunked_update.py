"""Update parameters in chunks: the next chunks are read from their tier while these are updated.

An elementwise optimizer updates any part of its parameters alone: torch's skip those without a gradient. So one
optimizer holds the state of everything, as it does with nothing offloaded, and is run once for each round:

    round 0    read │ update │ write
    round 1         │ read   │ update │ write
    round 2                  │ read   │ update │ write          three staging buffers: one in each column

A round is as many chunks as fit a staging buffer. With nothing elsewhere there is one round, of everything.

Rounds run when the gradients of all buckets are there (`step`). With `early`, the rounds of a bucket run as soon as its
gradients are there, on a separate thread during the backward of the others (`begin`, `arrived`, `finish`). What is
early is updated before it is known whether the step may be applied; `abandon` says whether it was.

Tensors of a chunk that rest on disk lie in one staging buffer meanwhile, as in the file (`ChunkVisit`):

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
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.memory.swap_file import SwapTransfer, TierError, whole_blocks
from meshwise.memory.tiers import Tiers


@dataclass(frozen=True, eq=False)
class UpdateChunk:
    """Elements that are updated at once, of one dtype.

    | slices      what the optimizer updates of them, one after the other
    | master      their values, where they rest
    | narrow      the parameters as the model has them, to be made of the masters; None where those are the same tensor
    | gradient    their gradients, where they rest when they have arrived
    | factor      what the gradients have yet to be multiplied by
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
        return sum(whole_blocks(rest.nbytes) for rest in self.rests.values())

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
                memory[name] = self._buffer[start : start + whole_blocks(rest.nbytes)]
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

    def write(self) -> Sequence[SwapTransfer]:
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
        return writes

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
        """`chunks`: the chunks of each bucket. Reserves where the optimizer's state rests.

        Raises TierError when there is no room for it.
        """
        self.optimizer = optimizer
        self._tiers = tiers
        self._rests: dict[nn.Parameter, dict[str, Tensor]] = {}
        together = chunks if early else [list(itertools.chain(*chunks))]
        self._rounds = {own[0]: list(self._in_rounds(map(self._resting, own))) for own in together if own}
        self._broken = False
        self._coming = _Coming()
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update") if early else None
        tiers.reserve(max((_bytes(round_) for rounds in self._rounds.values() for round_ in rounds), default=0))

    def step(self, done: Callable[[UpdateChunk], None]) -> None:
        """Update every chunk by its gradient, in the same order on every rank; return when it is done.

        Raises TierError when a tier fails; what is updated is then part old, part new, and stays so until a load.
        """
        self.check()
        self._tiers.settle()
        coming = _Coming()
        for rounds in self._rounds.values():
            coming.put(rounds)
        coming.end()
        self._broken = True
        self._go_through(coming, done)
        self._broken = False

    # ---- early -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare for the gradients of a step."""
        self.check()
        assert self._thread is not None
        self._coming = _Coming()
        self._under_way = self._thread.submit(self._beside, self._coming)

    def arrived(self, chunks: Sequence[UpdateChunk], *, ready: Callable[[], object]) -> None:
        """Update the chunks of one bucket when `ready`, called on the thread, returns."""
        self._coming.put(self._rounds[chunks[0]], ready=ready)

    def finish(self) -> None:
        """Return when all that have arrived are updated, which they may remain. Raises TierError like `step`."""
        assert self._under_way is not None
        self._coming.end()
        running, self._under_way = self._under_way, None
        running.result()
        self._tiers.settle()
        self._broken = False

    def abandon(self) -> bool:
        """End the updates of this step; return whether part of the parameters is already updated."""
        if self._under_way is not None:
            self._coming.end()
            running, self._under_way = self._under_way, None
            running.exception()
        return self._broken

    def _beside(self, coming: "_Coming") -> None:
        try:
            with self._tiers.on_copy_stream():
                self._go_through(coming, lambda _: None)
        except BaseException:
            self._broken = True
            raise

    # ---- what is part old, part new ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise TierError when an update came to nothing half way."""
        if self.abandon():
            raise TierError(
                "an update ended half way, so parameters and optimizer state are part old and part new; load a "
                "checkpoint to continue"
            )

    def broke(self) -> None:
        """Other ranks have updated something that this one has not."""
        self._broken = True

    def mended(self) -> None:
        """Everything has been loaded anew."""
        self._broken = False

    def close(self) -> None:
        """End the thread."""
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown()

    def zero_state(self, parameter: nn.Parameter, *, key: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros for the optimizer's state of a slice, where that rests."""
        rest = self._rests.get(parameter, {}).get(key)
        if rest is not None and rest.dtype == dtype:
            return rest.zero_()
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    # ---- rounds ------------------------------------------------------------------------------------------------

    def _go_through(self, coming: "_Coming", done: Callable[[UpdateChunk], None]) -> None:
        """Update round by round, and read the next while this one is updated.

        The first non-finite chunk, where finiteness was not checked before, is the last one updated.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        writes: list[SwapTransfer] = []
        sound = True
        with ExitStack() as open_visits:
            ahead: deque[ChunkVisit] = deque()
            while True:
                while len(ahead) < 2 and (round_ := coming.next(wait=not ahead)) is not None:
                    visit = ChunkVisit(round_, optimizer=self.optimizer, tiers=self._tiers)
                    ahead.append(open_visits.enter_context(visit))
                if not ahead:
                    break
                visit = ahead.popleft()
                visit.bring()
                sound = sound and (self._thread is None or visit.finite)
                if sound:
                    self._broken = True
                    for group, values in zip(self._groups, options, strict=True):
                        group.update(values)  # an optimizer that counts its steps there has to count one
                    began = time.monotonic()
                    self.optimizer.step()
                    self._tiers.updated(visit.bytes, since=began)
                    writes += visit.write()
                visit.leave()
                for resting in visit.round:
                    done(resting.chunk)
        for written in writes:
            written.wait()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _resting(self, chunk: UpdateChunk) -> StoredChunk:
        """Return which tensors of a chunk rest on disk; this also reserves room for the optimizer's state."""
        gradient = chunk.gradient() if self._tiers.offload.gradients == "disk" else None
        rests = {"master": chunk.master, "narrow": chunk.narrow, "gradient": gradient}
        found = {name: rest for name, rest in rests.items() if rest is not None and self._tiers.on_disk(rest)}
        if self._tiers.offload.optimizer == "disk":
            for key, dtype in self._kept(chunk).items():
                found[key] = self._tiers.empty("optimizer", numel=chunk.master.numel(), dtype=dtype)
        resting = StoredChunk(chunk, found)
        for parameter, span in resting.spans:
            self._rests[parameter] = {key: rest[span] for key, rest in found.items() if key not in rests}
            begun = self.optimizer.state.get(parameter, {})  # Adagrad's is made with the optimizer
            begun.update((key, rest.copy_(begun[key])) for key, rest in self._rests[parameter].items() if key in begun)
        return resting

    def _kept(self, chunk: UpdateChunk) -> Mapping[str, torch.dtype]:
        """Return the tensors that the optimizer keeps of a chunk: found out by a step of a small one with its
        options.
        """
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

    def _in_rounds(self, resting: Iterable[StoredChunk]) -> Iterator[Round]:
        """Yield rounds: as many chunks together as a staging buffer holds, or all when nothing moves."""
        most, round_ = self._tiers.swap.buffer, list[StoredChunk]()
        for one in resting:
            longer = [*round_, one]
            masters = sum(each.chunk.master.nbytes for each in longer)
            if round_ and self._tiers.most is not None and max(_bytes(longer), masters) > most:
                yield round_
                longer = [one]
            round_ = longer
        yield round_


class _Coming:
    """Rounds in the order in which they are to be updated, put there by another thread perhaps."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Sequence[Round], Callable[[], object]] | None] = SimpleQueue()
        self._here: deque[Round] = deque()
        self._over = False

    def put(self, rounds: Sequence[Round], *, ready: Callable[[], object] = lambda: None) -> None:
        """Queue `rounds` to come next, once `ready` returns."""
        self._queue.put((rounds, ready))

    def end(self) -> None:
        """There are no more."""
        self._queue.put(None)

    def next(self, *, wait: bool) -> Round | None:
        """Return the next one; None when there is none any more, or, if not to `wait`, yet."""
        while not self._here and not self._over:
            try:
                told = self._queue.get(block=wait)
            except Empty:
                return None
            if told is None:
                self._over = True
                break
            rounds, ready = told
            ready()
            self._here.extend(rounds)
        return self._here.popleft() if self._here else None


def _bytes(round_: Round) -> int:
    return sum(resting.bytes for resting in round_)
