"""Count the cores that this process may use, by its affinity and its cgroup's limit."""

import os
import sys
from pathlib import Path

_SHARE = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return the number of cores of the process's affinity, limited by the CPU quota of its cgroup; at least 1."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        share = _SHARE.read_text("utf-8").split()
    except OSError:
        return own
    if len(share) == 2 and share[0] != "max":
        own = max(1, min(own, round(int(share[0]) / int(share[1]))))
    return own
