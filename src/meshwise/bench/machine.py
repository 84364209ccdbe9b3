"""Facts about a machine that matter for training: software, processor, memory, GPUs, links, limits.

Everything is read from torch, the standard library, Linux's own files and, when there are GPUs, nvidia-smi. What a
system does not offer is left out.
"""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from meshwise.comm.api.streams import gpu_count, gpu_properties
from meshwise.comm.launch.cores import cores
from meshwise.comm.network.torch_world import backends

_TOOL_SECONDS = 10


@dataclass(frozen=True)
class Interface:
    """A network interface. Speed in bytes per second, 0 where the system does not say."""

    name: str
    up: bool
    speed: float


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that torch sees. Memory in bytes."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """The machine as one process sees it. Sizes in bytes; `cores` are those this process may use."""

    software: tuple[tuple[str, str], ...]
    processor: str
    cores: int
    memory: int
    shared_memory: int
    gpus: tuple[Gpu, ...]
    gpus_of_driver: int
    topology: str
    interfaces: tuple[Interface, ...]
    host: str
    host_addresses: tuple[str, ...]
    open_files: int
    locked_memory: int


def examine() -> Machine:
    """Look at this machine. Takes a second at most, more only when nvidia-smi is slow."""
    host = socket.gethostname()
    listed = _tool("nvidia-smi", "--list-gpus")
    return Machine(
        software=software(),
        processor=_processor(),
        cores=cores(),
        memory=_memory(),
        shared_memory=_size_of(Path("/dev/shm")),  # noqa: S108 - the mount itself, not a file in it
        gpus=_gpus(),
        gpus_of_driver=sum(line.startswith("GPU ") for line in listed.splitlines()),
        topology=_tool("nvidia-smi", "topo", "--matrix") if listed else "",
        interfaces=network_interfaces(),
        host=host,
        host_addresses=addresses_of(host),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def software() -> tuple[tuple[str, str], ...]:
    """Return names and versions that all ranks of a job should share."""
    named = {
        "meshwise": _version("meshwise"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "no",
        **backends(),
    }
    return tuple(named.items())


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of a host name, or none when it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def interface_names() -> tuple[str, ...]:
    """Return the network interfaces of this machine."""
    return tuple(name for _, name in socket.if_nameindex())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return models[0] if models else platform.processor() or platform.machine()


def _memory() -> int:
    """Return bytes of memory, or fewer when the control group's limit is smaller."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    return min(memory, int(limit)) if limit.isdecimal() else memory


def _size_of(mount: Path) -> int:
    return shutil.disk_usage(mount).total if mount.is_dir() else 0


def _gpus() -> tuple[Gpu, ...]:
    found = [gpu_properties(index) for index in range(gpu_count())]
    return tuple(Gpu(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}") for gpu in found)


def network_interfaces() -> tuple[Interface, ...]:
    """Return all of them, with the rate of the link where Linux knows it."""
    interfaces = []
    for name in interface_names():
        folder = Path("/sys/class/net") / name
        megabits = _first_line(folder / "speed")
        speed = int(megabits) * 1e6 / 8 if megabits.isdecimal() else 0.0
        interfaces.append(Interface(name, _first_line(folder / "operstate") in ("up", "unknown"), speed))
    return tuple(interfaces)


def _first_line(path: Path) -> str:
    """Return the file's first line; nothing when there is none to read (`speed` of a link that is down is an error)."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _tool(*command: str) -> str:
    """Return the output of a command, or "" when it is missing, fails or takes too long."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return done.stdout


def table(machine: Machine) -> Sequence[tuple[str, str]]:
    """Return the machine as lines of a name and a text."""
    gib = 1 << 30
    return [
        ("software", ", ".join(f"{name} {value}" for name, value in machine.software)),
        ("processor", f"{machine.processor}, {machine.cores} cores, {machine.memory / gib:.1f} GiB"),
        ("shared memory", f"{machine.shared_memory / gib:.1f} GiB" if machine.shared_memory else "none"),
        *(
            (f"GPU {index}", f"{gpu.name}, {gpu.memory / gib:.1f} GiB, compute capability {gpu.capability}")
            for index, gpu in enumerate(machine.gpus)
        ),
        ("GPUs", f"{len(machine.gpus)} for torch, {machine.gpus_of_driver} for the driver"),
        ("interfaces", ", ".join(link_text(interface) for interface in machine.interfaces)),
        ("host name", f"{machine.host}: {', '.join(machine.host_addresses) or 'does not resolve'}"),
        ("limits", f"{_limit(machine.open_files)} open files, {_limit(machine.locked_memory)} bytes locked"),
    ]


def link_text(interface: Interface) -> str:
    """`eth0 10 Gbit/s`."""
    speed = f" {interface.speed * 8 / 1e9:g} Gbit/s" if interface.speed else ""
    return f"{interface.name}{speed}{'' if interface.up else ' (down)'}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
