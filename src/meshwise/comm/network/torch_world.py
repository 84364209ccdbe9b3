"""The world of processes, on one machine or many, chosen by their devices and hosts.

    | device           joined by
    | CPU              shared memory on one host; messages over gloo on several hosts, or with comm=gloo
    | CUDA             NCCL; when two ranks have the same GPU, which NCCL refuses, messages over gloo with pinned copies
    | a world of one   nothing

It leaves torch's default process group alone: a job can use meshwise and its own `init_process_group` side by side.
"""

import errno
import os
import resource
import sys
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.hosts import on_one_host
from meshwise.comm.api.job_attempt import fresh
from meshwise.comm.api.launch_environment import launched
from meshwise.comm.api.streams import gpu_count, gpu_properties, nccl_version
from meshwise.comm.api.world import World
from meshwise.comm.network.gloo_world import GlooTransport, GlooWorld
from meshwise.comm.network.loopback import is_opened_by_launcher, store_of
from meshwise.comm.network.mailbox import Mailbox
from meshwise.comm.network.nccl_world import Communicators, NcclWorld, nccl
from meshwise.comm.shared_memory.group_queue import GroupQueues
from meshwise.comm.shared_memory.host_ranks import HostRanks
from meshwise.comm.shared_memory.local_world import LocalWorld
from meshwise.comm.shared_memory.process_memory import ProcessMemory

Comm: TypeAlias = Literal["auto", "local", "gloo"]
COMM_VARIABLE = "MESHWISE_COMM"


def meeting_place() -> c10d.Store | None:
    """Return the store that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name; None without them, or for a world of
    one.

    Every rank calls it, and gets a part of the store that no earlier start of the job has used. The store listens on
    the loopback interface alone when MASTER_ADDR leads there. Raises torch's DistError when it cannot be reached in ten
    minutes.
    """
    rank, size = _numbers()
    if size == 1:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and not is_opened_by_launcher()
    return fresh(store_of(host, port=port, opens=opens), rank=rank, size=size)


def torch_world(device: torch.device, *, store: c10d.Store | None = None, comm: Comm = "auto") -> World:
    """Return the world of all ranks of this job, over the mesh `rank=N`. Every rank calls it, once for each device
    type.

    `store`: where the ranks meet, by default the `meeting_place`. `comm`: how CPU ranks are joined, `local` (shared
    memory), `gloo`, or `auto`: shared memory where all ranks are on one host that has some.

    Raises ValueError when some ranks are on CPU and others on CUDA, or when `local` is impossible, and torch's
    DistError when ranks stay away for ten minutes.
    """
    rank, size = _numbers()
    mesh = Mesh.of(rank=size)
    found = store or meeting_place()
    if found is None:
        return GlooWorld(rank=rank, mesh=mesh, device=device, transport=None)
    own = c10d.PrefixStore(f"meshwise/{device.type}", found)
    devices = _devices(own, rank, size, device, comm)
    if device.type == "cuda" and len(set(devices)) == size:
        return NcclWorld(rank=rank, mesh=mesh, device=device, communicators=Communicators(own, backend=nccl))
    host = _share_memory(own, rank, size, comm) if device.type == "cpu" and comm != "gloo" else None
    if host is not None:
        return LocalWorld(rank=rank, mesh=mesh, queues=GroupQueues(host))
    mailbox = Mailbox(c10d.PrefixStore("gloo", own), rank=rank, size=size)
    return GlooWorld(rank=rank, mesh=mesh, device=device, transport=GlooTransport(mailbox))


def _share_memory(store: c10d.Store, rank: int, size: int, comm: Comm) -> HostRanks | None:
    """Return the shared memory of the ranks, or None on all ranks when one of them cannot share.

    Raises ValueError when `comm` requires sharing.
    """
    host, reason = None, ""
    if not on_one_host(store, rank=rank, size=size):
        reason = "they are on several hosts"
    else:
        memory = ProcessMemory(c10d.PrefixStore("memory", store), rank=rank, size=size)
        try:
            host = HostRanks.enter(c10d.PrefixStore("boards", store), rank=rank, ranks=range(size), memory=memory)
        except OSError as error:
            reason = str(error)
        store.set(f"unshared/{rank}", reason)
        reasons = [text.decode() for text in store.multi_get([f"unshared/{other}" for other in range(size)])]
        reason = next(filter(None, reasons), "")
        if reason and rank == 0 and comm == "auto":
            mend = f"{_remedy(reason)}set {COMM_VARIABLE}=gloo to hear no more of it"
            sys.stderr.write(
                f"meshwise: the ranks of one host cannot share memory ({reason}), so they talk through gloo, which is "
                f"several times slower; {mend}\n"
            )
    if reason and comm == "local":
        raise ValueError(f"comm=local, and the ranks cannot share memory: {reason}; comm=gloo works everywhere")
    return None if reason else host


def _remedy(reason: str) -> str:
    """Return advice that would let ranks share memory, to be put before an "or"; "" when none is known."""
    if os.strerror(errno.EFBIG) in reason:
        return "let files be larger (`ulimit -f unlimited`), or "
    if os.strerror(errno.ENOMEM) in reason and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "let processes have more addresses (`ulimit -v unlimited`), or "
    return "let them see each other's /proc (one user, one PID namespace), or " if sys.platform == "linux" else ""


def default_device() -> torch.device:
    """Return the GPU with this rank's local number (modulo the GPUs there are), or the CPU."""
    if (gpus := gpu_count()) == 0:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)


def _numbers() -> tuple[int, int]:
    """Return this process's rank and the size of its world."""
    own = launched()
    return (0, 1) if own is None else (own.rank, own.size)


def _devices(store: c10d.Store, rank: int, size: int, device: torch.device, comm: Comm) -> list[str]:
    """Return every rank's device: a name of its GPU that no other GPU has, or `cpu` and how it wants to be joined.

    Raises ValueError where the ranks differ in the kind of device or in `comm`: they would wait for each other.
    """
    own = f"cuda {gpu_properties(device).uuid}" if device.type == "cuda" else f"{device.type} {comm}"
    store.set(f"device/{rank}", own)
    devices = [text.decode() for text in store.multi_get([f"device/{other}" for other in range(size)])]
    types = {text.split()[0]: other for other, text in enumerate(devices)}
    if len(types) > 1:
        named = " and ".join(f"rank {other} on {name}" for name, other in sorted(types.items()))
        raise ValueError(f"the ranks of a world share one kind of device, but {named}; pass connect(device=…)")
    comms = {text.split()[1]: other for other, text in enumerate(devices)}
    if device.type == "cpu" and len(comms) > 1:
        named = " and ".join(f"{name} on rank {other}" for name, other in sorted(comms.items()))
        raise ValueError(
            f"the ranks of a world are joined in one way, but comm is {named}; set {COMM_VARIABLE} to one value"
        )
    return devices


def backends() -> dict[str, str]:
    """`gloo` and `nccl`, each with its version, `yes` or `no`."""
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "no",
        "nccl": nccl_version() if nccl and gpu_count() else "no",
    }
