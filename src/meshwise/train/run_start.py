"""Where a run begins: in a new folder or in one that is there, from nothing or from a checkpoint.

    | resume            folder                          begins from
    | (none)            a new one                       nothing
    | auto              `output`, if it is there        the newest valid checkpoint in it; nothing, if there is none
    | a folder          a new one                       that checkpoint, or the newest valid one of that run

Ranks that their launcher has started again find the folder that this job has made before by the launcher's name for
the job, and go on there: from its own checkpoints, and if there are none yet from where the job began.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwise.checkpoint.checkpoint_folder import newest_valid
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.train.job import Job, JobError

CHECKPOINTS = "checkpoints"
LAUNCH = "launch"
"""The file that keeps the launcher's name for the job, when the launcher may start its ranks again."""


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    folder    the run's folder to go on in; None: a new one
    roots     folders of checkpoints; the newest valid one of the first that has any is taken up
    chosen    one checkpoint that is taken up when there is none in `roots`
    """

    folder: Path | None = None
    roots: tuple[Path, ...] = ()
    chosen: Path | None = None

    def candidate(self) -> Path | None:
        """Return the checkpoint that will be taken up unless its bytes turn out to be damaged; None: from nothing."""
        found = (newest_valid(root).path for root in self.roots)
        return next((path for path in found if path is not None), self.chosen)


def find_run_start(job: Job, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run of this job begins, at this start of its ranks. Raises JobError for a `resume` to
    nowhere.
    """
    asked = _asked(job)
    again = None if attempt is None else _folder_of(attempt, Path(job.train.output))
    if again is None:
        return asked
    own = again / CHECKPOINTS
    return RunStart(again, (own, *(root for root in asked.roots if root != own)), asked.chosen)


def mark(folder: Path, *, attempt: JobAttempt | None) -> None:
    """Note in the run's folder whose it is, if its ranks may be started again. Raises OSError."""
    if attempt is not None and attempt.most:
        (folder / LAUNCH).write_text(attempt.run, encoding="utf-8")


def _asked(job: Job) -> RunStart:
    """Return the start that `train.resume` asks for."""
    output, resume = Path(job.train.output), job.train.resume
    if resume is None or (resume == "auto" and not output.exists()):
        return RunStart()
    if resume == "auto":
        if not any((output / name).exists() for name in ("job.toml", CHECKPOINTS)):
            raise JobError(
                f"train.resume = 'auto', but train.output = '{output}' is there and is no run: it has neither job.toml "
                f"nor {CHECKPOINTS}; name another folder"
            )
        return RunStart(output, (output / CHECKPOINTS,))
    place = Path(resume)
    if (place / INDEX).is_file():
        return RunStart(chosen=place)
    root = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    if not any(root.glob(f"*/{INDEX}")):
        raise JobError(
            f"train.resume = {resume!r}: no checkpoint there; name the folder of a run, one of its {CHECKPOINTS}, "
            "or 'auto'"
        )
    return RunStart(roots=(root,))


def _folder_of(attempt: JobAttempt, output: Path) -> Path | None:
    """Return the folder that an earlier start of this job has made."""
    if not attempt.is_named and not attempt.number:
        return None
    mine = [path for path in itertools.takewhile(Path.exists, numbered(output)) if _marked(path) == attempt.run]
    return mine[-1] if mine else None


def numbered(wanted: Path) -> Iterator[Path]:
    """Yield the folders that runs with this output claim, one after the other: `demo`, `demo-2`, `demo-3` and so on."""
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _marked(folder: Path) -> str | None:
    try:
        return (folder / LAUNCH).read_text(encoding="utf-8")
    except OSError:
        return None
