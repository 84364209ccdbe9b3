"""Read the facts about this machine that matter for training, from torch, Linux (/proc, /sys) and nvidia-smi."""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.base import __version__
from meshwise.comm.api.streams import gpu_count, gpu_properties
from meshwise.comm.launch.launch import cores
from meshwise.comm.network.choose_world import backends

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself, not a file in it


@dataclass(frozen=True)
class Machine:
    """Facts about the machine as this process sees it; sizes in bytes.

    | software          pairs of name and version; all ranks of a job should have equal versions
    | cores             number of CPU cores that this process may use
    | memory            main memory, or the limit of the control group (cgroup) if that is smaller
    | shared_memory     size of /dev/shm, or 0
    | gpus              one line of text for each CUDA device that torch sees
    | gpus_of_driver    number of GPUs that nvidia-smi lists
    | topology          output of `nvidia-smi topo --matrix`; empty without GPUs
    | open_files        number of files that this process may have open at once"""

    software: tuple[tuple[str, str], ...]
    processor: str
    cores: int
    memory: int
    shared_memory: int
    gpus: tuple[str, ...]
    gpus_of_driver: int
    topology: str
    host: str
    open_files: int


def machine_facts() -> Machine:
    """Return the facts about this machine. Runs nvidia-smi, for at most 10 s a call."""
    listed = _nvidia_smi("--list-gpus")
    gpus = map(gpu_properties, range(gpu_count()))
    software = {
        "meshwise": __version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cuda": torch.version.cuda or "no",
        **backends(),
    }
    return Machine(
        software=tuple(software.items()),
        processor=processor_name(),
        cores=cores(),
        memory=main_memory(),
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0,
        gpus=tuple(
            f"{gpu.name}, {gpu.total_memory / _GIB:.1f} GiB, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus
        ),
        gpus_of_driver=sum(line.startswith("GPU ") for line in listed.splitlines()),
        topology=_nvidia_smi("topo", "--matrix") if listed else "",
        host=socket.gethostname(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def processor_name() -> str:
    """Return the model of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return models[0] if models else platform.processor() or platform.machine()


def main_memory() -> int:
    """Return the bytes of main memory, or the limit of the control group (cgroup) if that is smaller."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def _nvidia_smi(*words: str) -> str:
    """Return the output of nvidia-smi, or "" when it is missing, fails or takes too long."""
    command = ["nvidia-smi", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ""


def machine_table(machine: Machine) -> Sequence[tuple[str, str]]:
    """Return the facts as pairs of a title and a text, for printing; the topology is left out."""
    return [
        ("software", ", ".join(f"{name} {value}" for name, value in machine.software)),
        ("processor", f"{machine.processor}, {machine.cores} cores, {machine.memory / _GIB:.1f} GiB"),
        ("shared memory", f"{machine.shared_memory / _GIB:.1f} GiB" if machine.shared_memory else "none"),
        *((f"GPU {index}", gpu) for index, gpu in enumerate(machine.gpus)),
        ("GPUs", f"{len(machine.gpus)} for torch, {machine.gpus_of_driver} for the driver"),
        ("host name", machine.host),
        ("open files", f"at most {machine.open_files}"),
    ]
