"""What torch's allocator has reserved on a rank of nanotron: more than there are tensors, for it keeps what was freed.

What the runs report as memory is that: the other column that they write, what is allocated at most, is set back after
every backward (`log_memory` in trainer.py) and knows of no activations, and the published figure grows with the rows of
a micro-batch. So a rank's tensors are put through the allocator's rules (c10/cuda/CUDACachingAllocator.cpp):

    a tensor of      gets the smallest free block that holds it, else a segment: of 20 MiB where it has less than 10, of
                     its own size in whole 2 MiB where it has more; what is left of a block, from 1 MiB on, is a block
    freed blocks     become one with free neighbours of their segment, never over two segments
    where no room    is left, what a stream still holds of what was freed is waited for, and every segment that is
                     wholly free is given back

Tensors of up to 1 MiB lie in segments of their own, which come to little and are left out."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwise.pipeline.schedules.schedule_table import Action, ActionKind
from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.step_tape import Category, MemoryChange, TapeSegment

_MIB = 2**20
_KEPT = (Category.ACTIVATIONS, Category.COMMUNICATION)


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    size: int
    before: Block | None = None
    after: Block | None = None
    key: tuple[int, int] | None = None
    """Where it stands among the free ones, if it is one."""


@dataclass
class Allocator:
    """Segments, in blocks."""

    room: float = math.inf
    """Bytes that it may reserve while it can give some back."""

    reserved: int = 0
    peak: int = 0
    late: list[Block] = field(default_factory=list)
    """What was freed, and streams still hold."""

    _free: dict[tuple[int, int], Block] = field(default_factory=dict)
    _order: list[tuple[int, int]] = field(default_factory=list)
    _number: int = 0

    def take(self, sizes: Iterable[int]) -> list[Block]:
        """Blocks for tensors of so many bytes."""
        return [self._block(size) for size in sizes if size > _MIB]

    def _block(self, size: int) -> Block:
        size = -(-size // 512) * 512
        at = bisect.bisect_left(self._order, (size, 0))
        block = self._out(self._order[at]) if at < len(self._order) else self._segment(size)
        if block.size - size > _MIB:
            rest = Block(block.size - size, before=block, after=block.after)
            if block.after:
                block.after.before = rest
            block.size, block.after = size, rest
            self._in(rest)
        return block

    def give(self, block: Block) -> None:
        """It is free."""
        before, after = block.before, block.after
        if before and before.key:
            self._out(before.key)
            before.size, before.after = before.size + block.size, after
            if after:
                after.before = before
            block = before
        if after and after.key:
            self._out(after.key)
            block.size, block.after = block.size + after.size, after.after
            if after.after:
                after.after.before = block
        self._in(block)

    def _segment(self, size: int) -> Block:
        asked = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        if self.reserved + asked > self.room:
            for block in self.late:
                self.give(block)
            self.late.clear()
            for block in [one for one in self._free.values() if one.before is None and one.after is None]:
                assert block.key
                self._out(block.key)
                self.reserved -= block.size
        self.reserved += asked
        self.peak = max(self.peak, self.reserved)
        return Block(asked)

    def _in(self, block: Block) -> None:
        self._number += 1
        block.key = block.size, self._number
        self._free[block.key] = block
        bisect.insort(self._order, block.key)

    def _out(self, key: tuple[int, int]) -> Block:
        del self._order[bisect.bisect_left(self._order, key)]
        block = self._free.pop(key)
        block.key = None
        return block


@dataclass(frozen=True)
class Held:
    """What a rank of nanotron holds beside activations."""

    words: Sequence[int]
    """Of each parameter, in the order of the forward."""

    dp: int
    zero: int
    late: Sequence[int] = ()
    """Bytes of what streams hold of what was freed."""

    @property
    def gradients(self) -> list[int]:
        """Bytes of what a backward gives, in its order.

        All of it is there until the backward is over: then it is added to the buffer (gradient_accumulator.py)."""
        return [2 * words for words in reversed(self.words)]

    @property
    def states(self) -> list[int]:
        """Bytes of what Adam makes in its first step."""
        return [-(-4 * words // self._shards) for words in self.words for _ in range(2)]

    @property
    def built(self) -> list[int]:
        """Bytes of what there is before the first step.

        Parameters, a buffer of all gradients in fp32, one of the parameters that this rank updates; and DDP's buckets.
        """
        total = sum(self.words)
        buckets = [2 * words for words in self.words] if self.dp > 1 and self.zero == 0 else []
        return [*(2 * words for words in self.words), 4 * total, -(-4 * total // self._shards), *buckets]

    @property
    def gathered(self) -> list[int]:
        """Bytes of what an all-gather into lists of tensors puts beside the parameters.

        What this rank sends, a copy for each rank (`all_gather_coalesced`), and what NCCL writes them all to
        (`newLikeFlat` in torch's ProcessGroupNCCL.cpp)."""
        if self.dp == 1 or self.zero == 0:
            return []
        part = 2 * sum(self.words) // self.dp
        return [part, *[part] * self.dp, part * self.dp]

    @property
    def _shards(self) -> int:
        return self.dp if self.zero else 1


def reserved(rehearsal: Rehearsal, *, index: int, held: Held, room: float = math.inf) -> int:
    """Bytes that a rank with this index along pp has reserved at most in a run's third step, which is what is reported.

    It gives back what nobody uses to have no more than `room` in the first two. In the third it does not: to do that in
    every step takes time that nothing here knows of."""
    allocator = Allocator(room)
    allocator.take(held.built)
    for step in range(3):
        if step == 2:
            allocator.room, allocator.peak = math.inf, allocator.reserved
        if step > 0:  # what was waited for to find room is let go of again
            allocator.late += allocator.take(held.late[len(allocator.late) :])
        segments = rehearsal.steps[index] if step else _first_step(rehearsal, index)
        _compute(_ends(segments, stages=len(rehearsal.tapes)), held, allocator)
        if step == 0:
            allocator.take(held.states)
        for block in allocator.take(held.gathered):
            allocator.give(block)
    return allocator.peak


def _first_step(rehearsal: Rehearsal, index: int) -> Iterator[TapeSegment]:
    """A run's first step. One of its micro-batches was recorded: in a pipeline it stands for the first one.

    A forward without a backward was passed over, but may leave buffers."""
    tape, piped = rehearsal.tapes[index], rehearsal.plan.pp > 1
    stages = dict(zip(*(rehearsal.schedule.stages_of(rank) for rank in (tape.index, index)), strict=True))
    begun: dict[Action, TapeSegment] = {}
    for segment in tape.first:
        if isinstance(action := segment.activity, Action):
            number = 0 if piped and action.microbatch is not None else action.microbatch
            begun[action._replace(stage=stages[action.stage], microbatch=number)] = segment
    for segment in rehearsal.steps[index]:
        if not isinstance(action := segment.activity, Action) or action not in begun:
            yield segment
        elif piped or action.kind is not ActionKind.F or action._replace(kind=ActionKind.B) in begun:
            yield TapeSegment(action, begun[action].entries)
        else:
            yield TapeSegment(action, (*begun[action].entries, *segment.entries))


def _ends(segments: Iterable[TapeSegment], *, stages: int) -> list[tuple[Action, TapeSegment]]:
    """A step's forwards and backwards, less micro-batches in the middle, which leave everything as it is."""
    found = [(one.activity, one) for one in segments if isinstance(one.activity, Action)]
    found = [(action, one) for action, one in found if action.kind in (ActionKind.F, ActionKind.B)]
    last = max(action.microbatch or 0 for action, _ in found)
    few = 3 * stages + 2
    return [(action, one) for action, one in found if not few <= (action.microbatch or 0) <= last - few]


def _compute(part: Iterable[tuple[Action, TapeSegment]], held: Held, allocator: Allocator) -> None:
    """Forwards and backwards.

    A backward's gradients come one after the other, evenly, and are let go of at its end, when nothing is left of its
    micro-batch."""
    batches: dict[int | None, dict[int, list[Block]]] = {}
    for action, segment in part:
        own = batches.setdefault(action.microbatch, defaultdict(list))
        sizes = [
            entry.bytes
            for entry in segment.entries
            if isinstance(entry, MemoryChange)
            and not entry.host
            and entry.category in _KEPT
            and abs(entry.bytes) > _MIB
        ]
        todo = held.gradients if action.kind is ActionKind.B else []
        made: list[Block] = []
        given = 0
        for number, size in enumerate(sizes, 1):
            if size > 0:
                own[size] += allocator.take([size])
            elif own[-size]:
                allocator.give(own[-size].pop())
            until = number * len(todo) // len(sizes)
            made += allocator.take(todo[given:until])
            given = until
        if action.kind is ActionKind.B:
            for block in (*made, *(block for blocks in batches.pop(action.microbatch).values() for block in blocks)):
                allocator.give(block)
