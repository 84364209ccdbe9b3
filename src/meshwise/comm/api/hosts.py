"""Which ranks are on one host."""

from __future__ import annotations

import socket
from pathlib import Path

from torch.distributed import distributed_c10d as c10d

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return a name that processes have in common when they run on one machine, in one container.

    Containers have their own host names, and names may repeat; a boot id is unique.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {socket.gethostname()}"


def hosts_of(store: c10d.Store, *, rank: int, size: int, name: str | None) -> list[int]:
    """By rank, the number of its host. Every rank calls it; `name`: this one's host, by default `host_name`."""
    store.set(f"host/{rank}", name or host_name())
    names = store.multi_get([f"host/{other}" for other in range(size)])
    numbers = {found: number for number, found in enumerate(dict.fromkeys(names))}
    return [numbers[found] for found in names]
