"""Write timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each rank is a process with four rows: computations and waits, links, collectives, and traffic between memory tiers.
Every message has an arrow, and memory by category is a counter. The format is JSON ("Trace Event Format"), times in µs.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwise.base.timeline import Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_table import RECEIVES, SENDS, Action, ActionKind, counterpart
from meshwise.view.plan_account import PlanAccount

ROWS: Mapping[TimelineRow, int] = {TimelineRow.LINK: 1, TimelineRow.COLLECTIVE: 2, TimelineRow.TIERS: 3}
"""Thread number of each row in a process of the trace; computations and waits are row 0."""
_NAMES = ("computes", "sends", "collectives", "tiers")
_APART = 10
"""Distance between the numbers of rows with the same name. Overlapping events get separate rows."""
_MICRO = 1e6


def write_chrome_trace(accounts: Sequence[PlanAccount], *, path: Path) -> None:
    """Write the trace of one or several plans to a JSON file. A time of 1 without a unit becomes a millisecond.

    The processes of several plans have the plan's title in their names. Raises OSError."""
    events: list[dict[str, Any]] = []
    first = 0
    for account in accounts:
        place = _Place(first, account.timeline)
        scale = _MICRO if account.unit == "s" else 1e-3 * _MICRO
        drawn = [one for event, row in _rows(account.timeline) for one in _events(event, row, scale, place)]
        rows = {(one["pid"], one["tid"]) for one in drawn}
        events += place.names(f"{account.title}: " if len(accounts) > 1 else "", account.names)
        events += (
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": _NAMES[row % _APART]}}
            for pid, row in sorted(rows)
        )
        events += drawn
        for history in account.histories:
            memory = {"ph": "C", "name": "memory", "pid": place.first + history.index}
            for level in history.levels:
                sizes = {str(category): size for category, size in level.device.items()}
                events.append({**memory, "ts": level.seconds * scale, "args": sizes})
        first += account.timeline.ranks
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _rows(timeline: Timeline) -> Iterator[tuple[Event, int]]:
    """Yield every event with its row."""
    free: dict[tuple[int, TimelineRow], list[float]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: event.start):
        if not event.is_background:
            yield event, 0
            continue
        ends = free[event.rank, event.stream]
        slot = next((slot for slot, end in enumerate(ends) if end <= event.start), len(ends))
        ends[slot : slot + 1] = [event.stop]
        yield event, ROWS[event.stream] + _APART * slot


class _Place:
    """Numbers of processes and names of messages in the trace, for the ranks of one timeline."""

    def __init__(self, first: int, timeline: Timeline) -> None:
        self.first = first
        self._stages = timeline.stages
        self._pipelines = {rank: ranks for ranks in timeline.pipelines for rank in ranks}

    def names(self, title: str, ranks: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the trace events that name the processes."""
        for rank, stages in enumerate(self._stages):
            name, pid = f"{title}{ranks[rank]}: stages {' '.join(map(str, stages))}", self.first + rank
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}

    def message(self, action: object, rank: int) -> str:
        """Return an identifier of a message that is unique in the whole trace."""
        return f"{self.first + self._pipelines[rank][0]}: {action}"


def _events(event: Event, row: int, scale: float, where: _Place) -> Iterator[dict[str, Any]]:
    start, stop = event.start * scale, event.stop * scale
    place = {"pid": where.first + event.rank, "tid": row}
    message = {"name": "message", "cat": "message", **place}
    yield {
        "ph": "X",
        "name": f"wait {event}" if event.stream is TimelineRow.WAIT else str(event),
        "cat": event.kind,
        "ts": start,
        "dur": stop - start,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
        **place,
    }
    if event.kind in SENDS:
        yield {"ph": "s", "id": where.message(event, event.rank), "ts": start, **message}
    elif event.kind in RECEIVES:
        assert event.stage is not None
        sent = counterpart(Action(event.stage, ActionKind(event.kind), event.microbatch))
        yield {"ph": "f", "bp": "e", "id": where.message(sent, event.rank), "ts": stop, **message}
