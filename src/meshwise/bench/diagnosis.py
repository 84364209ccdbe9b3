"""From facts to sentences: what is wrong with a machine, and what is wrong between ranks that answered a roll call."""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

import torch

from meshwise.bench.finding import MachineFinding, note, problem
from meshwise.bench.machine import Machine, addresses_of, interface_names
from meshwise.comm.api.flight_recorder import ranks_text
from meshwise.comm.health.roll_call import RollCallEntry
from meshwise.comm.launch.rank_process import asked_threads

_OLDEST_TORCH = (2, 11)
_SHARED_MEMORY = 1 << 30
_OPEN_FILES = 4096
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_COMPARED: Mapping[str, str] = {
    "meshwise": "install the same version everywhere",
    "torch": "install the same version everywhere",
    "python": "use the same Python everywhere: pickles and seeds may differ",
    "nccl": "install the same torch build everywhere, and unset NCCL overrides in LD_LIBRARY_PATH",
    "device": "give every rank a GPU, or hide the GPUs everywhere with CUDA_VISIBLE_DEVICES=",
}


def examine_machine(machine: Machine, *, ranks: int) -> list[MachineFinding]:
    """Return what will hinder `ranks` ranks on this machine."""
    found = []
    if _numbers(torch.__version__) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        found.append(problem(f"torch {torch.__version__} is too old", remedy=f"install torch {oldest} or later"))
    if machine.gpus_of_driver and not machine.gpus:
        found.append(
            problem(
                f"the driver has {machine.gpus_of_driver} GPUs and torch {torch.__version__} sees none",
                remedy="install a CUDA build of torch that this driver supports, and look at CUDA_VISIBLE_DEVICES",
            )
        )
    if dict(machine.software)["gloo"] == "no":
        found.append(problem("this torch was built without gloo", remedy="install torch from its own wheels"))
    if 0 < machine.shared_memory < _SHARED_MEMORY:
        found.append(
            note(
                f"/dev/shm has {machine.shared_memory >> 20} MiB; DataLoader workers and NCCL need more",  # noqa: S108
                remedy="start the container with --shm-size=8g or --ipc=host",
            )
        )
    if machine.open_files < _OPEN_FILES:
        found.append(
            note(f"{machine.open_files} open files allowed; many ranks need more", remedy=f"ulimit -n {_OPEN_FILES}")
        )
    if not machine.host_addresses:
        found.append(
            note(
                f"the host name {machine.host} does not resolve, so other machines' ranks cannot find this one",
                remedy=f"add {machine.host} to /etc/hosts, or name the interface in GLOO_SOCKET_IFNAME",
            )
        )
    threads = asked_threads() or 1
    if ranks * threads > machine.cores and not machine.gpus:
        found.append(
            note(
                f"{ranks} ranks of {threads} threads share {machine.cores} cores",
                remedy=f"start at most {max(1, machine.cores // threads)} ranks here, or set OMP_NUM_THREADS lower",
            )
        )
    return [*found, *check_interfaces(os.environ)]


def check_interfaces(environment: Mapping[str, str]) -> list[MachineFinding]:
    """Interfaces that the environment names and this machine does not have.

    gloo reads a list of names; NCCL a list of prefixes, exact names after `=`, exclusions after `^`.
    """
    found = []
    names = interface_names()
    for variable in _INTERFACE_VARIABLES:
        wanted = environment.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in wanted.removeprefix("=").split(","):
            if not any(there == name if exact else there.startswith(name) for there in names):
                remedy = f"set {variable} to one of {', '.join(names)}, or unset it"
                found.append(problem(f"{variable} names {name}, which this machine does not have", remedy=remedy))
    return found


def own_facts(machine: Machine, *, device: str) -> dict[str, str]:
    """Return the facts about this machine that a rank puts into the roll call."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return {
        **dict(machine.software),
        "device": device,
        "host": machine.host,
        "interface": interface,
        "loopback": "yes" if interface.startswith("lo") or (not interface and _only_loopback(machine.host)) else "no",
    }


def examine_roll(entries: Sequence[RollCallEntry], *, size: int, seconds: float) -> list[MachineFinding]:
    """Return what is wrong between the ranks that answered the roll call, where the launcher announced `size` ranks."""
    found = _sizes(entries)
    if not found:
        found += _missing(entries, size, seconds)
    found += _twice(entries)
    for fact, remedy in _COMPARED.items():
        by_value = _by(entries, fact)
        if fact == "python":
            by_value = _merge_patches(by_value)
        if len(by_value) > 1:
            told = " and ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
            found.append(problem(f"the ranks differ in {fact}: {told}", remedy=remedy))
    hidden = [entry.rank for entry in entries if entry.facts["loopback"] == "yes"]
    if len(_by(entries, "host")) > 1 and hidden:
        found.append(
            problem(
                f"{ranks_text(hidden)} can only be found from their own machine: their address is the loopback's",
                remedy="set GLOO_SOCKET_IFNAME there to the interface that the other machines can reach",
            )
        )
    return found


def _sizes(entries: Sequence[RollCallEntry]) -> list[MachineFinding]:
    by_size: dict[int, list[int]] = {}
    for entry in entries:
        by_size.setdefault(entry.size, []).append(entry.rank)
    if len(by_size) < 2:
        return []
    told = " and ".join(f"{size} on {ranks_text(ranks)}" for size, ranks in sorted(by_size.items()))
    return [
        problem(
            f"the ranks differ about the size of the world: {told}",
            remedy="start torchrun with the same --nnodes and --nproc-per-node on every machine",
        )
    ]


def _missing(entries: Sequence[RollCallEntry], size: int, seconds: float) -> list[MachineFinding]:
    missing = sorted(set(range(size)) - {entry.rank for entry in entries})
    if not missing:
        return []
    return [
        problem(
            f"{ranks_text(missing)} of {size} did not come within {seconds:g} s",
            remedy="look at their machines' output; start them, with the same MASTER_ADDR and MASTER_PORT",
        )
    ]


def _twice(entries: Sequence[RollCallEntry]) -> list[MachineFinding]:
    ranks = [entry.rank for entry in entries]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if not twice:
        return []
    return [
        problem(
            f"{ranks_text(twice)} came more than once",
            remedy="give torchrun another --node-rank on each machine, and end what is left of an earlier job",
        )
    ]


def _by(entries: Sequence[RollCallEntry], fact: str) -> dict[str, list[int]]:
    """Ranks by what they say."""
    ranks: dict[str, list[int]] = {}
    for entry in entries:
        ranks.setdefault(entry.facts[fact], []).append(entry.rank)
    return ranks


def _merge_patches(by_version: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Python 3.11.4 and 3.11.7 are the same for this purpose."""
    merged: dict[str, list[int]] = {}
    for text, ranks in by_version.items():
        merged.setdefault(".".join(text.split(".")[:2]), []).extend(ranks)
    return merged


def _numbers(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def _only_loopback(host: str) -> bool:
    addresses = addresses_of(host)
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
