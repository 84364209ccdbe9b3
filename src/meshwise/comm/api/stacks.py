"""Python stacks as text, short enough to be read for every rank of a report."""

import gc
import multiprocessing
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

_MOST_FRAMES = 12
_INDENT = "      "
_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
# Waiting in here, and what starts processes and threads: no part of the answer.
_LEFT_OUT = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(multiprocessing.__file__).parent}/",
    f"{_TORCH}multiprocessing/",
    f"{_TORCH}distributed/",
    threading.__file__,
    "<",
)


def stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost of these frames, outermost first, indented."""
    summary = traceback.StackSummary.extract(iter(frames))
    entries = [entry for entry in reversed(summary) if not entry.filename.startswith(_LEFT_OUT)]
    lines = [] if len(entries) <= _MOST_FRAMES else [f"… {len(entries) - _MOST_FRAMES} outer frames"]
    for entry in entries[-_MOST_FRAMES:]:
        lines.append(f"{entry.filename}:{entry.lineno} {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(_INDENT + line for line in lines)


def raised_at(error: BaseException) -> str:
    """`file:line function`: the innermost line of the traceback that its reader wrote, else that is not torch's."""
    entries = traceback.extract_tb(error.__traceback__)
    others = [entry for entry in entries if not entry.filename.startswith(_TORCH)]
    theirs = [entry for entry in others if not _is_pythons_or_ours(entry.filename)]
    entry = (theirs or others or entries)[-1]
    return f"{entry.filename}:{entry.lineno} {entry.name}"


def _is_pythons_or_ours(file: str) -> bool:
    pythons = file.startswith((_PYTHON, "<")) and "site-packages" not in file
    return pythons or file.startswith(_OURS)


def stack_of(thread: int | None) -> str:
    """Return the stack of the thread with this identifier, as it is now; empty when it has ended.

    Python makes the object of a frame when it is asked for, and may collect garbage for it. Garbage collection may
    switch threads: the other thread then returns from that frame, whose memory is reused. Reading it ended ranks with
    SIGSEGV. So nothing is collected until all frames have objects, which last.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = None if thread is None else sys._current_frames().get(thread)
        frames = [] if frame is None else list(traceback.walk_stack(frame))
    finally:
        if collects:
            gc.enable()
    return stack(frames)
