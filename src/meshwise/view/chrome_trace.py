"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per rank, with four rows: what it computes (and where it waits for a message), what its links carry, its
collectives, and what moves between tiers of memory; an arrow for every message. The format is Google's "Trace Event
Format": JSON, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwise.pipeline.action import RECEIVES, SENDS, Action, Kind
from meshwise.pipeline.passes import counterpart
from meshwise.timeline import Event, Stream, Timeline

ROWS: Mapping[Stream, int] = {Stream.COMPUTE: 0, Stream.WAIT: 0, Stream.LINK: 1, Stream.COLLECTIVE: 2, Stream.TIERS: 3}
_NAMES = ("computes", "sends", "collectives", "tiers")
_MICRO = 1e6


def write_chrome_trace(timelines: Mapping[str, Timeline], *, path: Path, seconds: float = 1.0) -> None:
    """Write the JSON of one or several timelines, under their titles.

    `seconds` is one unit of the timelines' times. Raises OSError when the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    before: list[Timeline] = []
    for title, timeline in timelines.items():
        place = _Place(sum(one.ranks for one in before), timeline)
        events += place.names(f"{title}: " if len(timelines) > 1 else "")
        for event in timeline.events:
            events += _events(event, seconds * _MICRO, place)
        before.append(timeline)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class _Place:
    """Which process of the trace each rank of a timeline is."""

    def __init__(self, first: int, timeline: Timeline) -> None:
        self.first = first
        self._stages = timeline.stages
        self._pipelines = {rank: ranks for ranks in timeline.pipelines for rank in ranks}

    def names(self, title: str) -> Iterator[dict[str, Any]]:
        """The names of processes and rows."""
        for rank, stages in enumerate(self._stages):
            name, pid = f"{title}rank {rank}: stages {' '.join(map(str, stages))}", self.first + rank
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for row, heading in enumerate(_NAMES):
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": heading}}

    def message(self, action: object, rank: int) -> str:
        """The name of a message, one in the whole trace."""
        return f"{self.first + self._pipelines[rank][0]}: {action}"


def _events(event: Event, scale: float, where: _Place) -> Iterator[dict[str, Any]]:
    start, stop = event.start * scale, event.stop * scale
    place = {"pid": where.first + event.rank, "tid": ROWS[event.stream]}
    message = {"name": "message", "cat": "message", **place}
    yield {
        "ph": "X",
        "name": f"wait {event}" if event.stream is Stream.WAIT else str(event),
        "cat": event.kind,
        "ts": start,
        "dur": stop - start,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
        **place,
    }
    if event.kind in SENDS:
        yield {
            "ph": "s",
            "name": "message",
            "cat": "message",
            "id": where.message(event, event.rank),
            "ts": start,
            **place,
        }
    elif event.kind in RECEIVES:
        assert event.stage is not None
        sent = counterpart(Action(event.stage, Kind(event.kind), event.microbatch))
        yield {"ph": "f", "bp": "e", "id": where.message(sent, event.rank), "ts": stop, **message}
