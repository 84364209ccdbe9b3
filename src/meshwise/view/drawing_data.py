"""Collect the data to draw for a plan (`PlanAccount`): timeline, memory, mesh and facts, predicted or measured.

`write_chrome_trace` writes timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
Each rank is a process with four rows: computations and waits, links, collectives, and traffic between memory tiers.
Every message has an arrow, and memory is a counter. The format is JSON ("Trace Event Format"), times in µs."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.base.text_format import time_text
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.pipeline.schedules.schedule_table import RECEIVES, SENDS, Action, ActionKind
from meshwise.plan import Plan
from meshwise.simulate.predicted_memory import Table, fullest, size_text
from meshwise.simulate.step_prediction import MemoryHistory, Prediction
from meshwise.simulate.step_tape import Category


@dataclass(frozen=True)
class PlanAccount:
    """Data to draw for one plan: the times of a step, and its memory if known."""

    title: str
    timeline: Timeline
    rows: tuple[str, ...] = ()
    """Names of the timeline's ranks; empty for `rank 0`, `rank 1`, …"""
    unit: str = "s"
    """Unit of its times: `s`, or empty for times without a unit."""
    plan: Plan | None = None
    room: float = 0.0
    """Bytes that tensors of a rank may use: infinite without a limit, 0 if unknown."""
    ranks_per_node: int = 0
    """0 if unknown."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other facts by title, in the order of the table."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category at the peak of the rank that needs most."""
    prediction: Prediction | None = None
    """The prediction that is drawn; None for a measured step and for a schedule."""

    @cached_property
    def histories(self) -> tuple[MemoryHistory, ...]:
        """Memory over time of all ranks along pp; of more than 6, of the first, fullest and last; () if unknown."""
        if self.prediction is None:
            return ()
        along = len(self.prediction.memory)
        fewer = sorted({0, fullest(self.prediction.memory).index, along - 1})
        return tuple(map(self.prediction.history, fewer if along > 6 else range(along)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the timeline's ranks."""
        return self.rows or tuple(f"rank {rank}" for rank in range(self.timeline.ranks))


def predicted_account(prediction: Prediction, *, title: str = "") -> PlanAccount:
    """Return the account of a prediction. Its ranks are the ranks along pp. `title`: by default the plan."""
    plan, cluster = prediction.rehearsal.plan, prediction.cluster
    along = len(prediction.rehearsal.tapes)
    memory, each = prediction.memory, plan.mesh().size // along
    peak, device = fullest(memory).peak, cluster.device
    needed = size_text(peak.bytes + int(device.own))  # as `meshwise plan` counts
    parts = [range(index * each, (index + 1) * each) for index in range(along)]
    facts = {
        "tokens/s": f"{prediction.tokens_per_second:,.0f}",
        "utilisation": f"{100 * prediction.utilisation:.1f} %",
        "peak memory": f"{needed} of {size_text(device.memory)}" if device.memory < math.inf else needed,
        "fits": "yes" if prediction.fits else "no",
        **{f"sent {where}": size_text(size) for where, size in prediction.traffic.items()},
    }
    if plan.sync_axes:
        steps = sum(times for times, _ in prediction.agreements)
        longest = prediction.seconds + max(added for _, added in prediction.agreements)
        facts |= {f"mean of {steps} steps": time_text(prediction.mean_seconds), "longest step": time_text(longest)}
        for where, size in prediction.agreement_traffic.items():
            facts[f"a round sends {where}"] = f"{size_text(size)} ({size_text(size / steps)} a step)"
    return PlanAccount(
        title or str(plan),
        prediction.timeline,
        rows=tuple(f"ranks {one[0]}–{one[-1]}" if each > 1 else f"rank {one[0]}" for one in parts),
        plan=plan,
        room=max(0.0, device.memory - device.own),
        ranks_per_node=cluster.ranks_per_node,
        facts=facts,
        peak={str(category): size for category, size in peak.device.items() if size},
        prediction=prediction,
    )


def measured_accounts(run: MeasuredStep) -> tuple[PlanAccount, ...]:
    """Return three accounts of a schedule: as measured, by the clock with mean times, and with equal stages."""
    timelines = {"measured": run.run, "by the clock": run.predicted, "equal stages": run.ideal}
    return tuple(PlanAccount(title, timeline) for title, timeline in timelines.items())


_LAST = ("update", "around", "bubble")
"""Activities that follow the waits in the table."""


def comparison_table(accounts: Sequence[PlanAccount]) -> Table:
    """Return a header of titles, then rows with a column per plan. Keys that are equal in all plans are left out."""
    rows: Table = [("", *(account.title for account in accounts))]
    plans = [account.plan.to_toml() if account.plan else {} for account in accounts]
    keys = dict.fromkeys(key for plan in plans for key in plan)
    differing = (key for key in keys if len({plan[key] for plan in plans if plan}) > 1)
    rows += ((key, *(str(plan.get(key, "")) for plan in plans)) for key in differing)
    rows.append(("step", *(time_text(account.timeline.seconds, unit=account.unit) for account in accounts)))
    found = {what for account in accounts for what in account.timeline.spent}
    waits = sorted(found - {"computes", *_LAST})
    for what in (what for what in ("computes", *waits, *_LAST) if what in found):
        rows.append((what, *(_part(account, what) for account in accounts)))
    for fact in dict.fromkeys(fact for account in accounts for fact in account.facts):
        rows.append((fact, *(account.facts.get(fact, "") for account in accounts)))
    for category in (str(category) for category in Category if any(one.peak.get(category) for one in accounts)):
        sizes = (size_text(account.peak.get(category, 0)) if account.peak else "" for account in accounts)
        rows.append((category, *sizes))
    return rows


def _part(account: PlanAccount, what: str) -> str:
    """Return the text of an activity's time, with its percentage of the step."""
    time = account.timeline.spent.get(what, 0.0)
    return f"{time_text(time, unit=account.unit)} ({100 * time / account.timeline.seconds:.1f} %)" if time else "0"


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
        scale = _MICRO if account.unit == "s" else 1e-3 * _MICRO
        drawn = list(_events(account.timeline, first, scale))
        title = f"{account.title}: " if len(accounts) > 1 else ""
        for rank, stages in enumerate(account.timeline.stages):
            name = f"{title}{account.names[rank]}: stages {' '.join(map(str, stages))}"
            events.append({"ph": "M", "name": "process_name", "pid": first + rank, "args": {"name": name}})
        for pid, row in sorted({(one["pid"], one["tid"]) for one in drawn}):
            args = {"name": _NAMES[row % _APART]}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": args})
        events += drawn
        for history in account.histories:
            memory = {"ph": "C", "name": "memory", "pid": first + history.index}
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
        ends = free[event.rank, event.row]
        slot = next((slot for slot, end in enumerate(ends) if end <= event.start), len(ends))
        ends[slot : slot + 1] = [event.stop]
        yield event, ROWS[event.row] + _APART * slot


def _events(timeline: Timeline, first: int, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a timeline, whose rank 0 is the process `first`. The id of a message is unique."""
    pipelines = {rank: ranks for ranks in timeline.pipelines for rank in ranks}
    for event, row in _rows(timeline):
        start, stop = event.start * scale, event.stop * scale
        place = {"pid": first + event.rank, "tid": row}
        message = {"name": "message", "cat": "message", **place}
        pipeline = first + pipelines[event.rank][0]
        yield {
            "ph": "X",
            "name": f"wait {event}" if event.row is TimelineRow.WAIT else str(event),
            "cat": event.kind,
            "ts": start,
            "dur": stop - start,
            "args": {"stage": event.stage, "microbatch": event.microbatch},
            **place,
        }
        if event.kind in SENDS:
            yield {"ph": "s", "id": f"{pipeline}: {event}", "ts": start, **message}
        elif event.kind in RECEIVES:
            assert event.stage is not None
            sent = Action(event.stage, ActionKind(event.kind), event.microbatch).counterpart
            yield {"ph": "f", "bp": "e", "id": f"{pipeline}: {sent}", "ts": stop, **message}
