"""Compute when each entry of a rank's tape starts and stops, from its seconds in a cost model."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwise.pipeline.schedules.action import COMPUTE
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.step_tape import Entry, TapeCall, TapeOperation, TapeSegment, TapeWait


class EntryTime(NamedTuple):
    """Start and stop of an entry of a tape, in seconds since the first segment began."""

    segment: TapeSegment
    entry: Entry
    start: float
    stop: float


def entry_times(segments: Iterable[TapeSegment], *, cost_model: CostModel) -> Iterator[EntryTime]:
    """Yield the times of the entries of consecutive segments, except messages between stages.

    Collectives along the same axes run one after the other on one stream; the rank computes until it waits for one. If
    the cluster cannot compute and communicate together (`overlap` is False), a wait follows each call. On a GPU the
    host runs ahead of the device."""
    cluster = cost_model.cluster
    launch, action, runs_ahead = cluster.device.launch, cluster.device.action, cluster.device.kind != "cpu"
    now = host = 0.0
    free: dict[tuple[str, ...], float] = defaultdict(float)
    ends: dict[int, float] = {}
    for segment in segments:
        if segment.kind in COMPUTE:
            host = (host if runs_ahead else now) + action
            now = now if runs_ahead else host
        for entry in segment.entries:
            if isinstance(entry, TapeOperation):
                host = (host if runs_ahead else now) + launch
                start = max(now, host)
                now = start + cost_model.seconds(entry)
                yield EntryTime(segment, entry, start, now)
            elif isinstance(entry, TapeCall):
                if entry.record.point_to_point:
                    continue
                start = max(now, free[entry.record.axes])
                end = free[entry.record.axes] = ends[entry.record.sequence] = start + cost_model.collective(entry)
                yield EntryTime(segment, entry, start, end)
                if not cluster.overlap:
                    yield EntryTime(segment, TapeWait(entry.record.sequence), now, end)
                    now = end
            elif isinstance(entry, TapeWait):
                end = max(now, ends.get(entry.sequence, 0.0))
                yield EntryTime(segment, entry, now, end)
                now = end
            else:
                start = now
                now += cost_model.allocation(entry)
                yield EntryTime(segment, entry, start, now)
