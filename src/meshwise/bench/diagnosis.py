"""Find problems of a machine (`examine_machine`) and between the ranks of a job (`examine_roll_call`), and remedies."""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwise.bench.machine import Machine, addresses_of
from meshwise.comm.api.flight_recorder import ranks_text
from meshwise.comm.health.roll_call import RollCallEntry
from meshwise.comm.launch.rank_process import asked_threads

_SHARED_MEMORY = 1 << 30
_OPEN_FILES = 4096
_STREAMS = 8
"""Streams of a rank that may work at once: compute, two directions of copies, NCCL's of groups and of messages."""
_NCCL = (2, 19)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_COMPARED: Mapping[str, str] = {
    "meshwise": "install the same version everywhere",
    "torch": "install the same version everywhere",
    "python": "use the same Python everywhere: pickles and seeds may differ",
    "nccl": "install the same torch build everywhere, and unset NCCL overrides in LD_LIBRARY_PATH",
    "device": "give every rank a GPU, or hide the GPUs everywhere with CUDA_VISIBLE_DEVICES=",
}


@dataclass(frozen=True)
class MachineFinding:
    """A finding. `problem`: ranks cannot train until it is solved. `note`: they can train here, maybe not elsewhere."""

    level: Literal["note", "problem"]
    what: str
    remedy: str


def problem(what: str, *, remedy: str) -> MachineFinding:
    """Return a finding of level `problem`: ranks cannot train until it is solved."""
    return MachineFinding("problem", what, remedy)


def note(what: str, *, remedy: str) -> MachineFinding:
    """Return a finding of level `note`: the ranks here can train nevertheless."""
    return MachineFinding("note", what, remedy)


def examine_machine(machine: Machine, *, ranks: int) -> Iterator[MachineFinding]:
    """Yield the problems and notes for `ranks` ranks on this machine. Also reads environment variables."""
    torch = dict(machine.software)["torch"]
    if machine.gpus_of_driver and not machine.gpus:
        yield problem(
            f"the driver has {machine.gpus_of_driver} GPUs and torch {torch} sees none",
            remedy="install a CUDA build of torch that this driver supports, and look at CUDA_VISIBLE_DEVICES",
        )
    if 0 < machine.shared_memory < _SHARED_MEMORY:
        yield note(
            f"/dev/shm has {machine.shared_memory >> 20} MiB; DataLoader workers and NCCL need more",  # noqa: S108
            remedy="start the container with --shm-size=8g or --ipc=host",
        )
    if machine.open_files < _OPEN_FILES:
        yield note(f"{machine.open_files} open files allowed; many ranks need more", remedy=f"ulimit -n {_OPEN_FILES}")
    if not machine.host_addresses:
        yield note(
            f"the host name {machine.host} does not resolve, so other machines' ranks cannot find this one",
            remedy=f"add {machine.host} to /etc/hosts, or name the interface in GLOO_SOCKET_IFNAME",
        )
    threads = asked_threads() or 1
    if ranks * threads > machine.cores and not machine.gpus:
        yield note(
            f"{ranks} ranks of {threads} threads share {machine.cores} cores",
            remedy=f"start at most {max(1, machine.cores // threads)} ranks here, or set OMP_NUM_THREADS lower",
        )
    if machine.gpus:
        yield from check_gpu_settings(os.environ, machine=machine, ranks=ranks)
    yield from check_interfaces(os.environ, names=[interface.name for interface in machine.interfaces])


def check_gpu_settings(environment: Mapping[str, str], *, machine: Machine, ranks: int) -> Iterator[MachineFinding]:
    """Yield notes on settings with which `ranks` ranks use the GPUs of a machine worse than they could."""
    allocator = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in allocator:
        yield note(
            "the allocator's segments cannot grow, so units that are gathered and freed fragment the GPU's memory",
            remedy="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdecimal() and int(queues) < _STREAMS:
        yield note(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: a rank's streams for compute, NCCL and copies share "
            f"{queues} queue{'s' if int(queues) > 1 else ''} of the GPU, and wait for each other",
            remedy="unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 32",
        )
    version = re.match(r"(\d+)\.(\d+)", dict(machine.software).get("nccl", ""))
    if version and tuple(map(int, version.groups())) < _NCCL:
        yield note(
            f"NCCL {version[0]} is older than {_NCCL[0]}.{_NCCL[1]}, and takes more GPU memory per communicator",
            remedy="install a torch build with a newer NCCL, or remove an older one from LD_LIBRARY_PATH",
        )
    if ranks > len(machine.gpus):
        yield note(
            f"{ranks} ranks share {len(machine.gpus)} GPUs; NCCL refuses this, so they use gloo, which is slower",
            remedy=f"start {len(machine.gpus)} ranks here, one for each GPU",
        )


def check_interfaces(environment: Mapping[str, str], *, names: Sequence[str]) -> Iterator[MachineFinding]:
    """Yield a problem for each interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names but the machine lacks.

    `names` are the machine's interfaces. gloo reads a list of names, NCCL a list of prefixes, or exact names after `=`.
    """
    for variable in _INTERFACE_VARIABLES:
        wanted = environment.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in wanted.removeprefix("=").split(","):
            if not any(own == name if is_exact else own.startswith(name) for own in names):
                remedy = f"set {variable} to one of {', '.join(names)}, or unset it"
                yield problem(f"{variable} names {name}, which this machine does not have", remedy=remedy)


def own_facts(machine: Machine, *, device: str) -> dict[str, str]:
    """Return the facts that this rank writes into the roll call: versions of software, `device`, `host` and `loopback`.
    `loopback` is `yes` if other machines cannot reach the rank: it has a loopback address, or its name is unresolved.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses_of(machine.host)]
    is_loopback = interface.startswith("lo") if interface else all(address.is_loopback for address in addresses)
    return {
        **dict(machine.software),
        "device": device,
        "host": machine.host,
        "loopback": "yes" if is_loopback else "no",
    }


def examine_roll_call(entries: Sequence[RollCallEntry], *, size: int, seconds: float) -> Iterator[MachineFinding]:
    """Yield the problems between the ranks of a job of `size` ranks. `seconds`: the time limit of the roll call."""
    ranks = [entry.rank for entry in entries]
    sizes = _ranks_by([str(entry.size) for entry in entries], ranks)
    missing = sorted(set(range(size)) - set(ranks))
    if len(sizes) > 1:
        yield problem(
            f"the ranks differ about the size of the world: {_in_words(sizes)}",
            remedy="start torchrun with the same --nnodes and --nproc-per-node on every machine",
        )
    elif missing:
        yield problem(
            f"{ranks_text(missing)} of {size} did not answer the roll call within {seconds:g} s",
            remedy="look at their machines' output; start them, with the same MASTER_ADDR and MASTER_PORT",
        )
    if repeated := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield problem(
            f"{ranks_text(repeated)} answered the roll call more than once",
            remedy="give torchrun another --node-rank on each machine, and end the processes of earlier jobs",
        )
    for fact, remedy in _COMPARED.items():
        values = _ranks_by([entry.facts[fact] for entry in entries], ranks)
        if len(values) > 1:
            yield problem(f"the ranks differ in {fact}: {_in_words(values)}", remedy=remedy)
    hidden = [entry.rank for entry in entries if entry.facts["loopback"] == "yes"]
    if hidden and len({entry.facts["host"] for entry in entries}) > 1:
        yield problem(
            f"{ranks_text(hidden)} can only be reached from their own machine: their address is a loopback address",
            remedy="set GLOO_SOCKET_IFNAME on that machine to an interface that the other machines can reach",
        )


def _ranks_by(values: Sequence[str], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return a dict from each value to the ranks that have it; `values[i]` belongs to `ranks[i]`."""
    found: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _in_words(ranks_by_value: Mapping[str, list[int]]) -> str:
    return " and ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items())
