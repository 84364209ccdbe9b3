"""One rank of one contestant, kept alive and told by `peers.py` when it is its turn.

Orders come as JSON lines on stdin, answers go as JSON lines to the file descriptor named in ANSWERS, away from whatever
a peer prints. Times are readings of the monotonic clock, which all processes of a machine share, so the wall time of a
turn is the last rank's end minus the first rank's start and needs no barrier inside what is timed."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpt


def reset_peak() -> None:
    """Forget the resident memory's high-water mark (Linux), so that the peak is that of the steps that follow."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_megabytes() -> float:
    """High-water mark of resident memory, 10^6 bytes: since `reset_peak` on Linux, of the whole process elsewhere.

    Memory that the ranks share counts once: each has its part of it."""
    status, shared = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")
    if status.exists() and shared.exists():
        peak = _kilobytes(status, "VmHWM:") - _kilobytes(status, "RssShmem:") + _kilobytes(shared, "Pss_Shmem:")
        return peak * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _kilobytes(file: Path, name: str) -> int:
    return int(next(line for line in file.read_text().splitlines() if line.startswith(name)).split()[1])


def python_calls(step: Callable[[int], object], number: int) -> int:
    """Run a step, and return how many Python functions this thread called in it."""
    calls = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(seen)
    try:
        step(number)
    finally:
        sys.setprofile(None)
    return calls


def operations(step: Callable[[int], object], number: int) -> int:
    """Run a step, and return how many operations of torch it ran, those inside of others included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(number)
    return sum(event.name.startswith("aten::") for event in profiler.events())


def main() -> None:
    """Build the contestant, answer ready, then serve orders until stdin closes."""
    setting: dict[str, Any] = json.loads(os.environ["SETTING"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(setting["threads"])
    with os.fdopen(int(os.environ["ANSWERS"]), "w", buffering=1) as answers:
        known = importlib.import_module(setting["module"])
        step = known.contestant(setting["contestant"]).build(gpt.Shape(**setting["shape"]), rank, size)
        answers.write(json.dumps({"ready": True}) + "\n")
        number = 0
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "reset_peak":
                reset_peak()
                answer: dict[str, Any] = {}
            elif order["do"] == "count":
                answer = {"calls": python_calls(step, number), "operations": operations(step, number + 1)}
                number += 2
            else:
                start = time.monotonic()
                losses = [step(number + offset) for offset in range(order["steps"])]
                answer = {"start": start, "end": time.monotonic(), "losses": losses, "peak": peak_megabytes()}
                number += order["steps"]
            answers.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # torch's DDP over gloo often aborts in an ordinary exit, and the results are all delivered


if __name__ == "__main__":
    main()
