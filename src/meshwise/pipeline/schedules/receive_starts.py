"""Choose when each rank starts its receives, so that the host may wait for a GPU at any launch (`receive_starts`).

CUDA loads a kernel at its first launch and frees memory only when all work of the device is done. A started receive is
such work, and it is done when the other rank has sent. If the other rank sends only after an answer that is not yet
launched here, both wait for ever. The same holds for a started send.

So a receive starts early, to overlap with computations, but not before its message depends on nothing that its rank
has still to launch. The order is found by running the table with ranks that start a computation only when all their
messages are under way: their sends have receives, and their receives have sends. Sends and receives launch no kernel
themselves."""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from meshwise.pipeline.schedules.schedule_table import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    counterpart,
    other_end,
)


def receive_starts(schedule: Schedule) -> Mapping[Action, Sequence[Action]]:
    """Return, for actions of a table with transfers, the receives that their rank starts before the action.

    A receive that is not named starts at its own action. At most one is started ahead on a rank, unless a rank would
    wait for ever. Raises ScheduleError for a table that deadlocks."""
    run = _CarefulRun(schedule)
    while run.ready or run.start_one_more():
        run.continue_one()
    if any(place < len(row) for place, row in zip(run.places, schedule.rows, strict=True)):
        raise ScheduleError("the schedule deadlocks: all unfinished ranks wait for messages")
    return run.starts


class _CarefulRun:
    """Run of a table in which a B takes 2 units of time and another computation 1.

    | places     number of actions that each rank has done
    | ready      heap of (time, rank): ranks that can continue
    | starts     receives by the action before which they start"""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, count = schedule, schedule.ranks
        self._receives = [[one for one in row if one.kind in RECEIVES] for row in schedule.rows]
        self._received, self._unanswered, self._free = [0] * count, [0] * count, [0.0] * count
        self._running: list[Action | None] = [None] * count
        self._sent: list[list[Action]] = [[] for _ in range(count)]
        self._started: list[set[Action]] = [set() for _ in range(count)]
        self._now = 0.0
        self.places = [0] * count
        self.ready = [(0.0, rank) for rank in range(count)]
        self.starts: dict[Action, list[Action]] = defaultdict(list)

    def continue_one(self) -> None:
        """Let the next rank do its actions up to a computation that takes time, or until it has to wait."""
        self._now, rank = heapq.heappop(self.ready)
        if self._now < self._free[rank]:
            return  # it was to continue for a message, and computes
        self._running[rank] = None
        row = self._schedule.rows[rank]
        while self.places[rank] < len(row):
            action = row[self.places[rank]]
            if action.kind in COMPUTE:
                self._start_next(rank)
                if not self._unanswered[rank]:
                    self.places[rank] += 1
                    self._compute(rank, action)
                return
            if action.kind in RECEIVES and not self._has_received(rank, action):
                return
            self.places[rank] += 1
            if action.kind in SENDS:
                self._send(rank, action)

    def start_one_more(self) -> bool:
        """Start the receive of a message for which a rank waits; return False if there is none."""
        for rank, sent in enumerate(self._sent):
            if sent:
                self._start(rank, sent[0], before=self._schedule.rows[rank][self.places[rank]])
                return True
        return False

    def _compute(self, rank: int, action: Action) -> None:
        self._running[rank] = action
        self._free[rank] = self._now + (2.0 if action.kind is ActionKind.B else 1.0)
        heapq.heappush(self.ready, (self._free[rank], rank))

    def _send(self, rank: int, action: Action) -> None:
        """Launch a send. Its receive starts now if the other rank waits for it, or before what the rank computes."""
        receive, target = counterpart(action), other_end(action, schedule=self._schedule)
        self._unanswered[rank] += 1
        self._sent[target].append(receive)
        row, place = self._schedule.rows[target], self.places[target]
        if row[place] == receive:
            heapq.heappush(self.ready, (max(self._now, self._free[target]), target))
        if self._running[target] is not None or row[place].kind in COMPUTE:
            self._start_next(target)

    def _has_received(self, rank: int, action: Action) -> bool:
        if action in self._sent[rank]:
            self._start(rank, action, before=None)
        if action not in self._started[rank]:
            return False
        self._started[rank].remove(action)
        self._received[rank] += 1
        return True

    def _start_next(self, rank: int) -> None:
        """Start the rank's next receive before its computation, if no other is started and its message is sent."""
        if self._started[rank] or self._received[rank] == len(self._receives[rank]):
            return
        following = self._receives[rank][self._received[rank]]
        if following in self._sent[rank]:
            self._start(rank, following, before=self._running[rank] or self._schedule.rows[rank][self.places[rank]])

    def _start(self, rank: int, receive: Action, *, before: Action | None) -> None:
        self._sent[rank].remove(receive)
        self._started[rank].add(receive)
        if before is not None:
            self.starts[before].append(receive)
        source = other_end(receive, schedule=self._schedule)
        self._unanswered[source] -= 1
        if not self._unanswered[source]:
            heapq.heappush(self.ready, (max(self._now, self._free[source]), source))
