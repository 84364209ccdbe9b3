"""Return Python stacks as text for reports: at most 12 frames, without frames of the folder comm and of threading."""

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
# Frames that wait in a collective or start a process or thread do not help the reader.
_LEFT_OUT = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(multiprocessing.__file__).parent}/",
    f"{_TORCH}multiprocessing/",
    f"{_TORCH}distributed/",
    threading.__file__,
    "<",
)


def stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost 12 of `frames`, a result of `traceback.walk_stack`, as text, the outermost first."""
    summary = traceback.StackSummary.extract(iter(frames))
    entries = [entry for entry in reversed(summary) if not entry.filename.startswith(_LEFT_OUT)]
    lines = [] if len(entries) <= _MOST_FRAMES else [f"… {len(entries) - _MOST_FRAMES} outer frames"]
    for entry in entries[-_MOST_FRAMES:]:
        lines.append(f"{entry.filename}:{entry.lineno} {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(_INDENT + line for line in lines)


def raised_at(error: BaseException) -> str:
    """Return `file:line function` of the innermost frame of an exception in the user's own code. If there is none: of
    the innermost frame outside torch, or else of the innermost frame."""
    entries = traceback.extract_tb(error.__traceback__)
    others = [entry for entry in entries if not entry.filename.startswith(_TORCH)]
    theirs = [entry for entry in others if not _is_pythons_or_ours(entry.filename)]
    entry = (theirs or others or entries)[-1]
    return f"{entry.filename}:{entry.lineno} {entry.name}"


def _is_pythons_or_ours(file: str) -> bool:
    pythons = file.startswith((_PYTHON, "<")) and "site-packages" not in file
    return pythons or file.startswith(_OURS)


def stack_of(thread: int | None) -> str:
    """Return the current stack of the thread with this identifier; "" if it has ended or the identifier is None.
    Garbage collection is off while the frames are read. Otherwise Python might collect garbage while it makes a frame
    object, and switch threads; the other thread could return from the frame, and its memory would be reused. Reading
    such memory ended ranks with SIGSEGV."""
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = None if thread is None else sys._current_frames().get(thread)
        frames = [] if frame is None else list(traceback.walk_stack(frame))
    finally:
        if collects:
            gc.enable()
    return stack(frames)
