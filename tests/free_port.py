"""Find a free port for a program that starts later and opens the port itself."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""What the system gives to programs that ask for any port: until the one that is meant has started, to another one."""


def free_port() -> int:
    """A port that nobody listens on, and that no program is given which asks for any."""
    lowest = max(10_100, int(_GIVEN.read_text().split()[0])) if _GIVEN.exists() else 32_768
    for number in random.Random(os.getpid()).sample(range(10_000, lowest), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", number))
            return number
    raise AssertionError("a hundred ports are taken")
