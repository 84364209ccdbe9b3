"""Collect the data that is drawn of a plan: timeline, memory, mesh and facts, from a prediction or a measured run."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.base.mesh import Mesh
from meshwise.base.timeline import Timeline, time_by_activity
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.plan import Plan
from meshwise.simulate.predicted_memory import fullest, size_text
from meshwise.simulate.step_prediction import MemoryHistory, Prediction, PredictionReplay

_MOST_HISTORIES = 6
"""With more ranks along pp than this, only the memory of the first, the fullest and the last is shown."""


@dataclass(frozen=True)
class PlanAccount:
    """Data to draw of one plan: the times of a step, and its memory if known."""

    title: str
    timeline: Timeline
    rows: tuple[str, ...] = ()
    """Names of the timeline's ranks; empty for `rank 0`, `rank 1`, …"""
    unit: str = "s"
    """Unit of its times: `s`, or empty for times without a unit."""
    plan: Plan | None = None
    room: float = 0.0
    """Bytes that a rank may use: infinite without a limit, 0 if unknown."""
    ranks_per_node: int = 0
    """0 if unknown."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other facts by title, in the order of the table."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category at the peak of the rank that needs most."""
    histories: tuple[MemoryHistory, ...] = ()
    """Memory over time of the ranks that are shown."""

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the plan; None without a plan."""
        return None if self.plan is None else self.plan.mesh()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the timeline's ranks."""
        return self.rows or tuple(f"rank {rank}" for rank in range(self.timeline.ranks))

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """Time of a step by activity (see `time_by_activity`), as the mean over the ranks, in the timeline's unit."""
        total: dict[str, float] = defaultdict(float)
        for own in time_by_activity(self.timeline):
            for what, seconds in own.items():
                total[what] += seconds
        return {what: seconds / self.timeline.ranks for what, seconds in total.items()}


def predicted_account(prediction: Prediction, *, title: str = "") -> PlanAccount:
    """Return the account of a prediction. Its ranks are the ranks along pp. `title`: by default the plan."""
    plan, cluster, replay = prediction.rehearsal.plan, prediction.cluster, PredictionReplay(prediction)
    along = len(prediction.rehearsal.tapes)
    memory, each = prediction.memory, plan.mesh().size // along
    peak, room = fullest(memory).peak, max(0.0, cluster.device.memory - cluster.device.own)
    parts = [range(index * each, (index + 1) * each) for index in range(along)]
    shown = sorted({0, fullest(memory).index, along - 1}) if along > _MOST_HISTORIES else range(along)
    facts = {
        "tokens/s": f"{prediction.tokens_per_second:,.0f}",
        "utilisation": f"{100 * prediction.utilisation:.1f} %",
        "peak memory": f"{size_text(peak.bytes)} of {size_text(room)}" if room < math.inf else size_text(peak.bytes),
        "fits": "yes" if prediction.fits else "no",
        **{f"sent {where}": size_text(size) for where, size in prediction.traffic.items()},
    }
    return PlanAccount(
        title or str(plan),
        replay.timeline,
        rows=tuple(f"ranks {one[0]}–{one[-1]}" if each > 1 else f"rank {one[0]}" for one in parts),
        plan=plan,
        room=room,
        ranks_per_node=cluster.ranks_per_node,
        facts=facts,
        peak={str(category): size for category, size in peak.device.items() if size},
        histories=tuple(replay.history(index) for index in shown),
    )


def measured_accounts(run: MeasuredStep) -> tuple[PlanAccount, ...]:
    """Return three accounts of a schedule: as measured, by the clock with mean times, and with equal stages."""
    timelines = {"measured": run.run, "by the clock": run.predicted, "equal stages": run.ideal}
    return tuple(PlanAccount(title, timeline) for title, timeline in timelines.items())
