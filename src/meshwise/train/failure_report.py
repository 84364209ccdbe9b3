"""Write the traceback of a failed rank into a file, and add a short note to the error (`leave_traceback`).

The note names the line of the user's own code, and the file. The traceback itself passes through launcher, loop, engine
and torch; only some two of its forty lines are the user's."""

import tempfile
import traceback
from pathlib import Path

from meshwise.base.atomic_file import write_whole
from meshwise.checkpoint.checkpoint_errors import DamageError, SaveError
from meshwise.comm.api.flight_recorder import RanksDisagree, raised_at
from meshwise.comm.api.job_processes import RankLostError
from meshwise.comm.api.world import World
from meshwise.engine.step_result import NonFiniteError
from meshwise.memory.swap_file import TierError
from meshwise.model.forward import LossError
from meshwise.plan import PlanError
from meshwise.simulate.predicted_memory import ShortageError
from meshwise.train.job import JobError

SELF_EXPLAINING = (
    DamageError,
    JobError,
    LossError,
    NonFiniteError,
    PlanError,
    RankLostError,
    RanksDisagree,
    SaveError,
    ShortageError,
    TierError,
)
"""Errors whose message says all that the user needs; no traceback is written for them."""

_PLACE = "the whole traceback "


def leave_traceback(error: Exception, *, world: World | None = None, folder: Path | None = None) -> None:
    """Write the traceback of `error` into a file in `folder` (by default a new temporary folder), and add a note to it.

    Does nothing for an error that has such a note or is in `SELF_EXPLAINING`. If writing fails, the note says why."""
    if isinstance(error, SELF_EXPLAINING) or any(_PLACE in note for note in notes(error)):
        return
    where = "" if world is None or world.size == 1 else f" on rank {world.rank} of {world.size}"
    name = "failure.txt" if world is None else f"failure-rank-{world.rank}.txt"
    try:
        file = Path(tempfile.mkdtemp(prefix="meshwise-") if folder is None else folder) / name
        text = "".join(traceback.format_exception(error))
        write_whole(file, write=lambda place: place.write_text(text, encoding="utf-8"))
        place = f"is in {file}"
    except OSError as refused:
        place = f"could not be written: {refused.strerror}"
    error.add_note(f"raised{where} at {raised_at(error)}; {_PLACE}{place}")


def notes(error: Exception) -> list[str]:
    """Return the notes of an error that are one line long. So it leaves out the tracebacks that the launcher adds."""
    return [note for note in getattr(error, "__notes__", []) if "\n" not in note]
