"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per rank, with three rows: what it computes (and where it waits for a message), what its links carry, and its
collectives; an arrow for every message. The format is Google's "Trace Event Format": JSON, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwise.pipeline.action import RECEIVES, SENDS, Action, Kind
from meshwise.pipeline.passes import counterpart
from meshwise.timeline import Event, Stream, Timeline

ROWS: Mapping[Stream, int] = {Stream.COMPUTE: 0, Stream.WAIT: 0, Stream.LINK: 1, Stream.COLLECTIVE: 2}
_NAMES = ("computes", "sends", "collectives")
_MICRO = 1e6


def write_chrome_trace(timeline: Timeline, *, path: Path, seconds: float = 1.0) -> None:
    """Write the JSON; `seconds` is one unit of the timeline's times. Raises OSError when the file cannot be written."""
    pipeline_of = {rank: number for number, ranks in enumerate(timeline.pipelines) for rank in ranks}
    events = list(_names(timeline))
    for event in timeline.events:
        events += _events(event, seconds * _MICRO, pipeline_of[event.rank])
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, stages in enumerate(timeline.stages):
        name = f"rank {rank}: stages {' '.join(map(str, stages))}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for row, title in enumerate(_NAMES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": title}}


def _events(event: Event, scale: float, pipeline: int) -> Iterator[dict[str, Any]]:
    start, stop = event.start * scale, event.stop * scale
    place = {"pid": event.rank, "tid": ROWS[event.stream]}
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
        yield {"ph": "s", "name": "message", "cat": "message", "id": f"{pipeline}: {event}", "ts": start, **place}
    elif event.kind in RECEIVES:
        assert event.stage is not None
        sent = counterpart(Action(event.stage, Kind(event.kind), event.microbatch))
        arrow = {"ph": "f", "bp": "e", "name": "message", "cat": "message"}
        yield {**arrow, "id": f"{pipeline}: {sent}", "ts": stop, **place}
