"""Plans of runs that computed every backward in one piece, as frameworks did whose measurements are published.

Ours sends the gradient of a stage's input before it computes those of its weights where a rank has no forward left. A
schedule that is read from a file is run as it stands there."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.plan import Plan


@contextlib.contextmanager
def whole_backwards(text: str) -> Iterator[Plan]:
    """The plan, with its schedule's table in a file that is there inside the block."""
    plan = Plan.parse(text)
    if plan.pp == 1:
        yield plan
        return
    table = make_schedule(plan.schedule, pp=plan.pp, microbatches=plan.microbatches, virtual_stages=plan.virtual_stages)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.txt"
        path.write_text(str(table), encoding="utf-8")
        yield dataclasses.replace(plan, schedule=str(path))
