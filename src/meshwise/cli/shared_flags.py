"""Check the flags that several commands share: `--ranks`, `--comm`, `--on`, and the paths of files to write.

A command first calls `check_outputs` or `check_drawings`. After the work, `write_and_say`, `write_drawings` and
`write_picture` write the files: each file is replaced whole or not at all."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from meshwise.base.atomic_file import is_read_only, write_whole
from meshwise.comm.api.launcher_info import is_rank, launched_rank
from meshwise.comm.health.watchdog import stall_seconds_from_environment
from meshwise.comm.launch.connect import comm_from_environment
from meshwise.comm.launch.launch import cores, torchrun_line
from meshwise.comm.network.choose_world import Comm
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.plan import AXES
from meshwise.simulate.cluster import Cluster, parse_cluster
from meshwise.train.console_output import OutputConsole, console_of_width, counted
from meshwise.train.job_settings import Job, JobError, as_job_error
from meshwise.train.run_checkpoints import TIMELINE
from meshwise.view.drawing_data import PlanAccount, write_chrome_trace
from meshwise.view.picture import Picture, svg_file, write_png
from meshwise.view.plan_pictures import page, picture_sheet


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Raise JobError for a path that cannot be written; None is skipped. Commands call it before their work starts."""
    for path in filter(None, paths):
        if path.is_dir():
            raise JobError(f"cannot write {path}: it is a folder; name a file in it")
        folder = next(parent for parent in path.resolve().parents if parent.exists())
        if is_read_only(path) or not (folder.is_dir() and (path.exists() or os.access(folder, os.W_OK))):
            raise JobError(f"cannot write {path}: no permission to write to it or to {folder}; name another path")


def write_and_say(path: Path | None, *, write: Callable[[Path], object], more: str = "") -> None:
    """Make the folders of `path`, let `write` write the file, and print the path followed by `more`.

    Do nothing if `path` is None. Raises JobError if the file cannot be written; an old file is then unchanged."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write=write)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    drawing_console().show(f"wrote {path}{more}")


@dataclass(frozen=True)
class DrawingFiles:
    """Flags for the picture files that a command can write."""

    html: Path | None = None
    """Write an HTML page here: tables, and pictures that show details under the pointer. It loads no other files."""
    png: Path | None = None
    """Write a PNG here; needs the extra `plot`."""
    svg: Path | None = None
    """Write an SVG here."""
    trace: Path | None = None
    """Write a Chrome trace here, which ui.perfetto.dev opens. Times without a unit are written as milliseconds."""

    @property
    def wanted(self) -> bool:
        """True if any file is to be written."""
        return any((self.html, self.png, self.svg, self.trace))


def drawing_console() -> OutputConsole:
    """Return a console on stdout for drawings; where stdout is no terminal, its lines have at most 120 columns."""
    return console_of_width(120)


def check_drawings(files: DrawingFiles) -> None:
    """Raise JobError for a file that cannot be written, and for a PNG when matplotlib is not installed."""
    check_outputs((files.html, files.png, files.svg, files.trace))
    require_matplotlib(files.png)


def require_matplotlib(png: Path | None) -> None:
    """Raise JobError if a PNG is to be written (`png` is not None) and matplotlib is not installed."""
    if png is not None and find_spec("matplotlib") is None:
        raise JobError("a PNG needs matplotlib: pip install 'meshwise[plot]'")


def read_step(run: Path) -> MeasuredStep:
    """Return the measured step of a run, given its folder or timeline.json. Raises JobError if it cannot be read."""
    path = run / TIMELINE if run.is_dir() else run
    with as_job_error(OSError):
        if not path.exists():
            raise JobError(f"{path} is not there; train with --train.timeline=3 to measure three steps of a run")
        return MeasuredStep.read(path)


def write_drawings(accounts: Sequence[PlanAccount], *, files: DrawingFiles, title: str) -> None:
    """Draw the plans (`accounts`) into the files that are not None, and print the paths.

    Raises JobError if a file cannot be written."""
    write_and_say(files.html, write=lambda path: path.write_text(page(accounts, title=title), encoding="utf-8"))
    write_and_say(files.trace, write=lambda path: write_chrome_trace(accounts, path=path))
    if files.png or files.svg:
        write_picture(picture_sheet(accounts), png=files.png, svg=files.svg)


def write_picture(picture: Picture, *, png: Path | None, svg: Path | None) -> None:
    """Write a picture to the paths that are not None, and print them. Raises JobError when a file cannot be written."""
    write_and_say(png, write=lambda path: write_png(picture, path=path))
    write_and_say(svg, write=lambda path: path.write_text(svg_file(picture), encoding="utf-8"))


DEFAULT_RANKS = 4
"""Limit of the number of local ranks where neither the plan nor a flag gives the number: laptops have few cores."""


def checked_comm(comm: Comm | Literal["threads"]) -> Comm | None:
    """Return the value of `--comm` as `run` expects it: None for `auto` (MESHWISE_COMM decides) and for `threads`.

    Raises JobError for a bad MESHWISE_COMM or MESHWISE_STALL_SECONDS."""
    if comm == "threads":
        return None
    with as_job_error():
        if comm == "auto":
            comm_from_environment()
        stall_seconds_from_environment()
    return None if comm == "auto" else comm


def launched_ranks() -> int | None:
    """Return torchrun's number of ranks; None without torchrun. Raises JobError if torchrun's variables are wrong."""
    with as_job_error():
        return (launched_rank() or (0, None))[1]


def local_ranks(job: Job) -> int:
    """Return the number of ranks of a job: torchrun's number, else `job.ranks`, else the number that the plan needs.

    With `dp=auto`, dp is as large as fits into the number of cores and into 4 ranks, and at least 1. The ranks of
    `server` come on top."""
    if launched := launched_ranks():
        return launched
    if job.ranks is not None:
        return job.ranks
    needed: int = math.prod(getattr(job.plan, axis) or 1 for axis in AXES)
    if job.plan.dp is not None:
        return needed + job.plan.server
    return needed * max(1, min(DEFAULT_RANKS, cores()) // needed) + job.plan.server


def named_cluster(name: str) -> Cluster:
    """Return the cluster that `--on` names, as in "64x8 h100". Raises JobError for an unknown cluster."""
    with as_job_error(of="--on: "):
        return parse_cluster(name)


def run_chosen(
    words: Sequence[str], *, command: str, kind: str, choices: Mapping[str, Callable[[Sequence[str]], None]]
) -> int:
    """Call the choice that the first word names with the other words, and return the exit status 0.

    `kind`: noun for a choice, as in "benchmark". Raises JobError when the first word names no choice."""
    names = ", ".join(f"meshwise {command} {name}" for name in choices)
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {names}; each has --help")
        return 0
    if not words or words[0] not in choices:
        given = f"unknown {kind} {words[0]!r}" if words and not words[0].startswith("-") else f"name a {kind}"
        raise JobError(f"{given}; choose from: {names}")
    choices[words[0]](words[1:])
    return 0


def say_start(size: int, *, words: Sequence[str], restarts: int = 0) -> None:
    """Print that local ranks start, and the torchrun command that starts the same ranks; on a rank, print nothing.

    `words`: the words of the command line after `meshwise`."""
    if not is_rank():
        line = torchrun_line(size, ["-m", "meshwise", *words], restarts=restarts)
        print(f"starting {counted(size, of='local rank')}; the same with torchrun:\n  {line}", flush=True)
