"""`meshwise draw`: a schedule, a cut and a mesh before a run, a step of a run after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshwise.cli import draw_cut, draw_mesh, draw_schedule, draw_timeline
from meshwise.train.job import JobError

DRAWINGS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "schedule": draw_schedule.main,
    "cut": draw_cut.main,
    "mesh": draw_mesh.main,
    "timeline": draw_timeline.main,
}


def main(words: Sequence[str]) -> int:
    """Draw what the words name. Raises JobError for what cannot be drawn, before anything is."""
    there_is = ", ".join(f"meshwise draw {name}" for name in DRAWINGS)
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {there_is}; each tells its options with --help")
        return 0
    if not words or words[0] not in DRAWINGS:
        given = f"no drawing {words[0]!r}" if words and not words[0].startswith("-") else "name what to draw"
        raise JobError(f"{given}; there is: {there_is}")
    return DRAWINGS[words[0]](words[1:])
