"""Choose when each rank starts its receives, so that a launch may wait for all earlier work (`receive_starts`).

A launch may wait for a started receive, and its sender for a later action of this rank. Then both ranks wait for ever
(docs/gpu.md, "NCCL on one GPU"). The same holds for a started send.

So a receive starts early, to overlap with computations, but only if its sender needs no later action of this rank. The
order is found by a careful run of the table. There a rank starts a computation, gather or reduction only when each
message that it has started is matched at the other end. Sends and receives launch no kernel themselves."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from meshwise.pipeline.schedules.schedule_table import RECEIVES, SENDS, Action, Schedule, ScheduleError


@lru_cache(maxsize=8)
def receive_starts(schedule: Schedule) -> Mapping[Action, Sequence[Action]]:
    """Return, for actions of a table with transfers, the receives that their rank starts before the action.

    A receive that is not named starts at its own action. At most one is started ahead on a rank, unless a rank would
    wait for ever. Raises ScheduleError for a table that deadlocks."""
    run = _CarefulRun(schedule)
    while run.exchange() or run.compute() or run.start_one_more():
        pass
    if any(run.next_action(rank) for rank in range(schedule.ranks)):
        raise ScheduleError("the schedule deadlocks: all unfinished ranks wait for messages")
    return run.starts


class _CarefulRun:
    """Run of a table in which each action but a message takes one unit of time. `starts`: see `receive_starts`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._places = [0] * schedule.ranks
        self._running: dict[int, Action] = {}
        self._sent: dict[Action, int] = {}
        """Receives that have not started, though their messages are sent, and the ranks that sent them."""
        self._started: set[Action] = set()
        self.starts: dict[Action, list[Action]] = defaultdict(list)

    def next_action(self, rank: int) -> Action | None:
        """Return the next action of a rank; None at the end of its row."""
        row, place = self._schedule.rows[rank], self._places[rank]
        return row[place] if place < len(row) else None

    def exchange(self) -> bool:
        """Let each rank send and receive up to its next other action, or to a message that it waits for."""
        before = [*self._places]
        for rank in range(self._schedule.ranks):
            self._exchange(rank)
        return before != self._places

    def compute(self) -> bool:
        """Do the next action, no message, of each rank whose sends all have receives; return whether there is one."""
        for rank in set(range(self._schedule.ranks)).difference(self._sent.values()):
            action = self.next_action(rank)
            if action is not None and action.kind not in RECEIVES | SENDS:
                self._running[rank] = action
                self._places[rank] += 1
        computed = [*self._running]
        for rank in computed:  # one ends after the other
            del self._running[rank]
            self._exchange(rank)
        return bool(computed)

    def start_one_more(self) -> bool:
        """Start a receive for whose message a rank waits; return False if there is none."""
        for receive in self._sent:
            self._start(receive)
            return True
        return False

    def _exchange(self, rank: int) -> None:
        while (action := self.next_action(rank)) is not None:
            if action.kind in SENDS:
                self._sent[action.counterpart] = rank
                self._start_next(self._schedule.other_end(action))
            else:
                self._start_next(rank)
                if action not in self._started:
                    return
            self._places[rank] += 1

    def _start_next(self, rank: int) -> None:
        """Start the rank's next receive if its message is sent."""
        row = self._schedule.rows[rank]
        rest = (row[place] for place in range(self._places[rank], len(row)))
        receive = next((action for action in rest if action.kind in RECEIVES), None)
        if receive in self._sent:
            self._start(receive)

    def _start(self, receive: Action) -> None:
        rank = self._schedule.rank_of[receive.stage]
        before = self._running.get(rank) or self.next_action(rank)
        if before is not None and before != receive:
            self.starts[before].append(receive)
        self._started.add(receive)
        del self._sent[receive]
