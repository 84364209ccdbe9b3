"""Choose and make the World of a job whose ranks are processes, by the devices and hosts of the ranks.

docs/architecture.md has the world of each case ("Worlds"). NCCL refuses two ranks on a GPU, unless
NCCL_MULTI_RANK_GPU_ENABLE is 1. One rank has a `GlooWorld`.

torch's default process group is not used: a job may call `init_process_group` as well.
`gloo_calls` returns torch's own gloo collectives, with which benchmarks compare the collectives of this package."""

import errno
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.launcher_info import launched_rank
from meshwise.comm.api.streams import gpu_count, gpu_properties, nccl_version
from meshwise.comm.api.world import Work, World
from meshwise.comm.network.gloo_world import GlooTransport, GlooWorld
from meshwise.comm.network.job_store import LOOPBACK, job_store, on_one_host
from meshwise.comm.network.nccl_world import Communicators, NcclWorld, nccl
from meshwise.comm.shared_memory.group_queue import GroupQueues
from meshwise.comm.shared_memory.host_connection import HostConnection
from meshwise.comm.shared_memory.local_world import LocalWorld

Comm: TypeAlias = Literal["auto", "local", "gloo"]
"""How CPU ranks communicate: `local` (shared memory), `gloo`, or `auto`: shared memory on one host if possible."""

COMM_VARIABLE = "MESHWISE_COMM"
"""Environment variable with a value of `Comm`; `auto` without the variable."""

NCCL_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable: if it is 1, NCCL accepts several ranks on one GPU. NCCL 2.30 is the first that knows it."""

_SHARES = " shared"

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables in which launchers number the ranks of a host; the first one that is set is used."""


def process_world(device: torch.device, *, store: c10d.Store | None = None, comm: Comm = "auto") -> World:
    """Return the world of all N ranks of the job, over the mesh `rank=N`. Every rank calls this function, once for each
    device type. device: where this rank's tensors are. store: None for `job_store()`. comm: see `Comm`.
    Raises ValueError when some ranks are on CPU and others on CUDA, when `comm` differs between ranks, or when `local`
    is impossible. Raises torch's DistError when ranks are missing for ten minutes."""
    rank, size = launched_rank() or (0, 1)
    mesh = Mesh.of(rank=size)
    found = store or job_store()
    if found is None:
        return GlooWorld(rank=rank, mesh=mesh, device=device, transport=None)
    own = c10d.PrefixStore(f"meshwise/{device.type}", found)
    devices = _devices(own, rank, size, device, comm)
    if device.type == "cuda" and takes_nccl(devices):
        return NcclWorld(rank=rank, mesh=mesh, device=device, communicators=Communicators(nccl(own)))
    host = _share_memory(own, rank, size, comm) if device.type == "cpu" and comm != "gloo" else None
    if host is not None:
        return LocalWorld(rank=rank, mesh=mesh, queues=GroupQueues(host))
    transport = GlooTransport(c10d.PrefixStore("gloo", own), rank=rank, size=size)
    return GlooWorld(rank=rank, mesh=mesh, device=device, transport=transport)


def takes_nccl(devices: Sequence[str]) -> bool:
    """Return whether ranks with these GPUs (`_devices`) use NCCL: each has its own, or all of them may share."""
    gpus = {name.removesuffix(_SHARES) for name in devices}
    return len(gpus) == len(devices) or all(name.endswith(_SHARES) for name in devices)


def _share_memory(store: c10d.Store, rank: int, size: int, comm: Comm) -> HostConnection | None:
    """Return the connection of the ranks through shared memory, or None on all ranks when one rank cannot share memory.
    Prints the reason on rank 0. Raises ValueError instead when `comm` is `local`."""
    host, reason = None, ""
    if not on_one_host(store, rank=rank, size=size):
        reason = "they are on several hosts"
    else:
        try:
            host = HostConnection.enter(c10d.PrefixStore("boards", store), rank=rank, ranks=range(size))
        except OSError as error:
            reason = str(error)
        store.set(f"unshared/{rank}", reason)
        reasons = [text.decode() for text in store.multi_get([f"unshared/{other}" for other in range(size)])]
        reason = next(filter(None, reasons), "")
        if reason and rank == 0 and comm == "auto":
            mend = f"{_remedy(reason)}set {COMM_VARIABLE}=gloo to turn this message off"
            sys.stderr.write(
                f"meshwise: the ranks of one host cannot share memory ({reason}). They use gloo, which is several "
                f"times slower; {mend}\n"
            )
    if reason and comm == "local":
        raise ValueError(f"comm=local, but the ranks cannot share memory: {reason}; comm=gloo works everywhere")
    return None if reason else host


def _remedy(reason: str) -> str:
    """Return the remedy for ranks that cannot share memory, as text that ends with "or "; "" if none is known."""
    if os.strerror(errno.EFBIG) in reason:
        return "allow larger files (`ulimit -f unlimited`), or "
    if os.strerror(errno.ENOMEM) in reason and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "allow processes more address space (`ulimit -v unlimited`), or "
    return "let them see each other's /proc (one user, one PID namespace), or " if sys.platform == "linux" else ""


def default_device() -> torch.device:
    """Return GPU n of this host, where n is the rank's number on the host, modulo the number of GPUs. Without GPUs,
    return the CPU. The number comes from LOCAL_RANK, or from the variable of Slurm, Open MPI or MPICH. Raises
    ValueError if there are several GPUs and several ranks, and none of these variables is set."""
    if (gpus := gpu_count()) == 0:
        return torch.device("cpu")
    number = next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name)), None)
    if number is None and gpus > 1 and (launched_rank() or (0, 1))[1] > 1:
        raise ValueError(
            f"LOCAL_RANK is not set on a host with {gpus} GPUs: each rank would take the first one. Start the ranks "
            'with torchrun, set LOCAL_RANK to 0, 1, … on each host, or pass connect(device="cuda:N")'
        )
    return torch.device("cuda", int(number or "0") % gpus)


def _devices(store: c10d.Store, rank: int, size: int, device: torch.device, comm: Comm) -> list[str]:
    """Return the devices of all ranks, by rank: `cuda` and the UUID of the GPU, or `cpu` and the value of `comm`. Ranks
    whose GPU NCCL may share have `_SHARES` at the end. Raises ValueError when the ranks differ in the type of device or
    in `comm`: they would wait for each other."""
    own = f"cuda {gpu_properties(device).uuid}" if device.type == "cuda" else f"{device.type} {comm}"
    if device.type == "cuda" and os.environ.get(NCCL_SHARES_GPUS) == "1":
        own += _SHARES
    store.set(f"device/{rank}", own)
    devices = [text.decode() for text in store.multi_get([f"device/{other}" for other in range(size)])]
    types = {text.split()[0]: other for other, text in enumerate(devices)}
    if len(types) > 1:
        named = " and ".join(f"rank {other} on {name}" for name, other in sorted(types.items()))
        raise ValueError(f"the ranks of a world share one kind of device, but {named}; pass connect(device=…)")
    comms = {text.split()[1]: other for other, text in enumerate(devices)}
    if device.type == "cpu" and len(comms) > 1:
        named = " and ".join(f"{name} on rank {other}" for name, other in sorted(comms.items()))
        raise ValueError(f"all ranks of a world need one comm, but comm is {named}; set {COMM_VARIABLE} to one value")
    return devices


def backends() -> dict[str, str]:
    """Return which backends torch has: `gloo` with `yes` or `no`, `nccl` with its version or `no` (without a GPU)."""
    nccl = nccl_version() if dist.is_nccl_available() and gpu_count() else "no"
    return {"gloo": "yes" if dist.is_gloo_available() else "no", "nccl": nccl}


Call: TypeAlias = Callable[[World, Tensor, Tensor], Sequence[Work | c10d.Work]]
"""Function (world, x, y) that starts a collective and returns the works to wait for. The collective reads x and writes
y, or works in place on one of them. Both tensors have the size of the gathered tensor; a rank's part is a slice."""


def gloo_calls(world: World, *, size: int) -> Mapping[str, Call]:
    """Return torch's gloo collectives among the first `size` ranks, by name: all_reduce, all_gather, reduce_scatter,
    broadcast. The mapping is empty on the other ranks, and in a job of one rank. Every rank of the world calls this
    function, and all ranks are on one host. Raises RuntimeError when gloo cannot connect the ranks."""
    store = job_store()
    if store is None or world.rank >= size:
        return {}
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    group: Any = c10d.ProcessGroupGloo(store, world.rank, size, options)  # torch's stubs know none of its collectives

    def part(x: Tensor) -> Tensor:
        return x.view(size, -1)[world.rank]

    return {
        "all_reduce": lambda _, x, __: [group.allreduce([x])],
        "all_gather": lambda _, __, y: [group._allgather_base(y, part(y))],  # in place, which saves gloo a copy
        "reduce_scatter": lambda _, x, y: [group._reduce_scatter_base(part(y), x)],
        "broadcast": lambda _, x, __: [group.broadcast(x, root=0)],
    }
