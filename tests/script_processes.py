"""Run programs of a test as separate processes: a script, or ranks that no launcher starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from free_port import free_port
from warm_command import WarmCommand

SECONDS = 200.0


def ended(source: str, *words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a script says until the last of those that write where it does has ended. It ends with status 0."""
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, str(script), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )


def ended_ranks(source: str, *, size: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank of a program that nothing launches."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**meeting, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    ranks = [
        WarmCommand("-c", source, variables={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        return [rank.end(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
