"""A timed schedule as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per rank, with three rows: what it computes (and where it waits for a message), what its links carry, and its
collectives; an arrow for every message. The format is Google's "Trace Event Format": JSON, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise.pipeline.action import COMPUTE, RECEIVES, SENDS
from meshwise.pipeline.clock import Event, Timing
from meshwise.pipeline.passes import counterpart

ROWS = ("computes", "sends", "collectives")
_MICRO = 1e6


def write_chrome_trace(timing: Timing, *, path: Path, seconds: float = 1.0) -> None:
    """Write the JSON; `seconds` is one unit of the timing's times. Raises OSError when the file cannot be written."""
    events = [*_names(timing), *(made for event in timing.events for made in _events(event, seconds * _MICRO))]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _names(timing: Timing) -> Iterator[dict[str, Any]]:
    for rank in range(timing.schedule.ranks):
        stages = " ".join(map(str, timing.schedule.stages_of(rank)))
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}: stages {stages}"}}
        for row, name in enumerate(ROWS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}


def _events(event: Event, scale: float) -> Iterator[dict[str, Any]]:
    action, start, end = event.action, event.start * scale, event.end * scale
    place = {"pid": event.rank, "tid": _row(event)}
    name = f"wait {action}" if action.kind in RECEIVES else str(action)
    arguments = {"stage": action.stage, "microbatch": action.microbatch}
    yield {
        "ph": "X",
        "name": name,
        "cat": str(action.kind),
        "ts": start,
        "dur": end - start,
        "args": arguments,
        **place,
    }
    if action.kind in SENDS:
        yield {"ph": "s", "name": "message", "cat": "message", "id": str(action), "ts": start, **place}
    elif action.kind in RECEIVES:
        arrow = {"ph": "f", "bp": "e", "name": "message", "cat": "message"}
        yield {**arrow, "id": str(counterpart(action)), "ts": end, **place}


def _row(event: Event) -> int:
    if event.action.kind in COMPUTE | RECEIVES:
        return 0
    return 1 if event.action.kind in SENDS else 2
