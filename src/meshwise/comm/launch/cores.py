"""Count the cores of this process: its affinity and its cgroup's share, not all cores of the machine."""

import os
import sys
from pathlib import Path

_SHARE = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return the cores this process may use, reduced to its cgroup's share of time."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        share = _SHARE.read_text("utf-8").split()
    except OSError:
        return own
    if len(share) == 2 and share[0] != "max":
        own = max(1, min(own, round(int(share[0]) / int(share[1]))))
    return own
