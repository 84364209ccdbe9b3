"""Chains: collectives made of several collectives, one after the other.

The next step of a chain can only be called when the one before is complete, and when that is differs from rank to rank.
But all ranks of a group have to make their calls in one order. So every step has calls of its own kind, apart from all
others (the `purpose` of its group), and each kind is called in the order of the chains:

    | chain 1   step 1    step 2              step 3          step 2 of chain 2 is called after step 2 of chain 1,
    | chain 2      step 1            step 2        step 3     at the earliest

Chains of different groups have nothing to do with each other. No thread drives a chain: it advances when this rank
waits for any call, or makes another one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.grad_mode import each_as_called
from meshwise.comm.api.progress import Progress
from meshwise.comm.api.world import Group, Work, World

Steps: TypeAlias = Iterator[Work]


class ChainedCollectives:
    """All chains of one rank."""

    def __init__(self) -> None:
        self._queues: dict[tuple[tuple[int, ...], str], _Queue] = {}

    def begin(self, steps: Steps, *, world: World, stamp: CallRecord, group: Group) -> Work:
        """Return the chain of these steps of a call of the group, begun: its first step is called at once."""
        queue = self._queues.setdefault((group.ranks, group.purpose), _Queue())
        chain = _Chain(world, stamp=stamp, steps=each_as_called(steps), queue=queue)
        queue.add(chain)
        return chain

    def progress(self) -> Progress:
        """Advance every chain whose step is complete."""
        return max((queue.advance() for queue in tuple(self._queues.values())), default=Progress.NOTHING)

    def finish(self) -> None:
        """Wait for all of them."""
        for queue in self._queues.values():
            queue.finish()


class _Queue:
    """The chains of one group that are not complete, in the order of the calls."""

    def __init__(self) -> None:
        self._chains: deque[_Chain] = deque()
        self._advancing = False

    def add(self, chain: _Chain) -> None:
        chain.go_on()
        self._chains.append(chain)

    def advance(self) -> Progress:
        """Advance the ready chains; no chain overtakes the one before it."""
        if self._advancing:  # a call of a step came by while it waited for its turn
            return Progress.LATER
        self._advancing = True
        outlook = Progress.NOTHING
        try:
            most = math.inf
            for chain in tuple(self._chains):
                while chain.begun < most and chain.step.ready:
                    chain.go_on()
                    outlook = Progress.DID
                most = chain.begun
        finally:
            self._advancing = False
        while self._chains and self._chains[0].over:
            self._chains.popleft()
        return outlook or (Progress.LATER if self._chains else Progress.NOTHING)

    def wait(self) -> None:
        """Until the first chain is a step further."""
        self._chains[0].step.wait()
        self.advance()

    def finish(self) -> None:
        while self._chains:
            self.wait()


class _Chain(Work):
    """One chain of collectives. `begun`: how many steps have been called."""

    def __init__(self, world: World, *, stamp: CallRecord, steps: Steps, queue: _Queue) -> None:
        super().__init__(world, stamp=stamp)
        self.step = Work()
        self.begun: float = 0
        self._steps = steps
        self._queue = queue
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.begun == math.inf

    def go_on(self) -> None:
        """Call the next step; the one under way is ready."""
        if self._error is not None:
            raise self._error
        try:
            self.step.wait()
            self.step = next(self._steps)
            self.begun += 1
        except StopIteration:
            self.step, self.begun = Work(), math.inf
        except BaseException as error:
            self._error = error
            raise

    def _finish(self) -> None:
        while not self.over:
            self._queue.wait()
