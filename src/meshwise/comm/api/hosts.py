"""Find out whether ranks are on one host."""

import socket
from pathlib import Path

from torch.distributed import distributed_c10d as c10d

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return a name that is equal for processes of one machine and one container.

    Containers have their own host names, and names may repeat; a boot id is unique.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {socket.gethostname()}"


def on_one_host(store: c10d.Store, *, rank: int, size: int) -> bool:
    """Return whether all ranks are on one host, by `host_name`. Every rank calls it."""
    store.set(f"host/{rank}", host_name())
    return len(set(store.multi_get([f"host/{other}" for other in range(size)]))) == 1
