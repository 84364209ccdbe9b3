"""Find out whether the ranks of a job are all on one host."""

import socket
from pathlib import Path

from torch.distributed import distributed_c10d as c10d

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the boot ID of the machine and the host name, a text that only processes of one container share.
    Containers of a machine have different host names, and machines with equal host names have different boot IDs."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {socket.gethostname()}"


def on_one_host(store: c10d.Store, *, rank: int, size: int) -> bool:
    """Return whether `host_name` is equal on all ranks. Every rank calls this function, over the same `store`."""
    store.set(f"host/{rank}", host_name())
    return len(set(store.multi_get([f"host/{other}" for other in range(size)]))) == 1
