"""Check that this machine can train and that its ranks can communicate, and report the reason when they cannot.

    | 1  `examine_machine`: software, cores, memory, GPUs, links, limits
    | 2  `examine_roll_call` under torchrun: each rank registers in the store of the job; some may be missing or differ
    | 3  `exchange_messages` of all ranks of the job (or of local ranks): compare and time messages of every pair

Step 3 only runs if the steps before found no problem. Every step that waits for other ranks has a short time limit,
because the ordinary time limits of a job are too long for a check.

In round d of step 3, rank r sends to rank r + d and receives from rank r − d, modulo the number of ranks:

    4 ranks, 3 rounds:    0→1 1→2 2→3 3→0    0→2 1→3 2→0 3→1    0→3 1→0 2→1 3→2"""

import contextlib
import functools
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from meshwise.base.package_table import package_table
from meshwise.bench.machine import Machine, machine_facts
from meshwise.comm.api.flight_recorder import ranks_text
from meshwise.comm.api.launcher_info import launch_error
from meshwise.comm.api.world import World, wait_all
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.launch import run
from meshwise.comm.launch.rank_process import threads_from_environment
from meshwise.comm.network.choose_world import NCCL_SHARES_GPUS
from meshwise.comm.network.job_store import RollCallEntry, is_opened_by_launcher, roll_call

_SHARED_MEMORY = 1 << 30
_OPEN_FILES = 4096
_STREAMS = 8
"""Streams of a rank that may work at once: compute, two directions of copies, NCCL's of groups and of messages."""

_REMEDIES = package_table("bench/remedies.toml")

_SMALL_MESSAGES = 20
_LARGE_BYTES = 4 << 20

_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class MachineFinding:
    """A finding. `problem`: ranks cannot train until it is solved. `note`: some jobs may be slow, or fail."""

    level: Literal["note", "problem"]
    what: str
    remedy: str


problem = functools.partial(MachineFinding, "problem")
note = functools.partial(MachineFinding, "note")


@dataclass(frozen=True)
class PairLink:
    """Link of two ranks, the smaller first: seconds of a small message (8 bytes), bytes/s of a large one (4 MiB)."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class PairMessages:
    """Results of an exchange between all ranks, equal on every rank. `medium`: such as `shared memory` or `NCCL`."""

    size: int
    device: str
    medium: str
    links: tuple[PairLink, ...]
    findings: tuple[MachineFinding, ...]


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
    threads = threads_from_environment() or 1
    if ranks * threads > machine.cores and not machine.gpus:
        yield note(
            f"{ranks} ranks of {threads} threads share {machine.cores} cores",
            remedy=f"start at most {max(1, machine.cores // threads)} ranks here, or set OMP_NUM_THREADS lower",
        )
    if machine.gpus:
        yield from check_gpu_settings(os.environ, machine=machine, ranks=ranks)


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
    if ranks > len(machine.gpus) and environment.get(NCCL_SHARES_GPUS) != "1":
        yield note(
            f"{ranks} ranks share {len(machine.gpus)} GPUs; NCCL refuses this, so they use gloo, which is slower",
            remedy=f"start {len(machine.gpus)} ranks here, one for each GPU; or set {NCCL_SHARES_GPUS}=1, which lets "
            "ranks share a GPU under NCCL 2.30 and later",
        )


def examine_roll_call(entries: Sequence[RollCallEntry], *, size: int, seconds: float) -> Iterator[MachineFinding]:
    """Yield the problems between the ranks of a job of `size` ranks. `seconds`: the time limit of the roll call."""
    ranks = [entry.rank for entry in entries]
    sizes = _ranks_by([str(entry.size) for entry in entries], ranks)
    missing = sorted(set(range(size)) - set(ranks))
    if len(sizes) > 1:
        yield problem(
            f"the ranks differ in the size of the world: {_in_words(sizes)}",
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
    for fact, remedy in _REMEDIES["facts"].items():
        values = _ranks_by([entry.facts[fact] for entry in entries], ranks)
        if len(values) > 1:
            yield problem(f"the ranks differ in {fact}: {_in_words(values)}", remedy=remedy)


def _ranks_by(values: Sequence[str], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return a dict from each value to the ranks that have it; `values[i]` belongs to `ranks[i]`."""
    pairs = list(zip(values, ranks, strict=True))
    return {value: [rank for one, rank in pairs if one == value] for value in values}


def _in_words(ranks_by_value: Mapping[str, list[int]]) -> str:
    return " and ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items())


def check_reachable(address: str, *, port: int, seconds: float) -> MachineFinding | None:
    """Try for `seconds` to connect to the store of the job. Return None if it accepts, else the problem."""
    where, until = f"{address}:{port}", time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=max(until - time.monotonic(), _RETRY_SECONDS)).close()
        except socket.gaierror:
            return problem(
                f"MASTER_ADDR={address} does not resolve on this machine",
                remedy="give torchrun --rdzv-endpoint an IP address, or add the name to /etc/hosts or the DNS",
            )
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < until:
                time.sleep(_RETRY_SECONDS)
                continue
            if isinstance(error, ConnectionRefusedError):
                what = f"nothing listens at {where} (refused for {seconds:g} s)"
                remedy = "start rank 0 on that machine first, and give all ranks the same MASTER_PORT"
            else:
                what = f"{where} does not answer within {seconds:g} s ({error})"
                remedy = f"open port {port} in the firewall between the machines, or choose an address both can reach"
            return problem(what, remedy=remedy)
        return None


def check_port(port: int) -> MachineFinding | None:
    """Return a problem if this process, rank 0, cannot listen at the port of the job's store, else None."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return problem(
            f"rank 0 cannot open port {port}: {os.strerror(error.errno or 0).lower()}",
            remedy="choose another MASTER_PORT on all ranks, or end the process that has it",
        )
    return None


def exchange_messages(world: World) -> PairMessages:
    """Exchange messages between all ranks, and return times and problems. Every rank calls this function."""
    findings: list[MachineFinding] = []
    links: list[PairLink] = []
    for distance in range(1, world.size):
        link, wrong = _exchange(world, distance)
        links.append(link)
        findings += wrong
        world.barrier()
    everyone = world.exchange((links, findings))
    by_pair = {link.ranks: link for own, _ in everyone for link in own}
    pairs = tuple(by_pair[pair] for pair in sorted(by_pair))
    found = dict.fromkeys(finding for _, own in everyone for finding in own)
    return PairMessages(world.size, world.device.type, world.medium, pairs, tuple(found))


def _exchange(world: World, distance: int) -> tuple[PairLink, list[MachineFinding]]:
    """Send to rank r + `distance` and receive from rank r − `distance`: small messages, then large messages."""
    axis = world.mesh.names[0]
    to, source = (world.rank + distance) % world.size, (world.rank - distance) % world.size
    streams = world.streams
    world.prepare(lines=[(rank, (rank + distance) % world.size) for rank in range(world.size)])
    seconds, is_wrong = [], False
    for elements in (*[2] * (_SMALL_MESSAGES + 1), _LARGE_BYTES // 4, _LARGE_BYTES // 4):
        own = torch.full((elements,), float(world.rank), device=world.device)
        received = torch.empty_like(own)
        streams.synchronize()
        start = time.perf_counter()
        wait_all((world.send(own, axis=axis, to=to), world.recv(received, axis=axis, source=source)))
        streams.synchronize()
        seconds.append(time.perf_counter() - start)
        is_wrong = is_wrong or bool((received != source).any())
    pair = (min(source, world.rank), max(source, world.rank))
    link = PairLink(pair, statistics.median(seconds[1 : _SMALL_MESSAGES + 1]), _LARGE_BYTES / seconds[-1])
    if not is_wrong:
        return link, []
    text = f"a message from rank {source} to rank {world.rank} arrived with changed bytes"
    return link, [problem(text, remedy="test the memory and the network cards of the two machines")]


@dataclass
class DoctorReport:
    """Results of an examination. `exchanges`: one for each kind of device (CPU, GPU) on which the ranks could run."""

    machine: Machine
    findings: list[MachineFinding]
    exchanges: list[PairMessages] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if no finding is a problem; notes do not count."""
        return all(finding.level != "problem" for finding in self.findings)

    def add(self, exchange: PairMessages) -> None:
        """Add an exchange of messages and its findings."""
        self.exchanges.append(exchange)
        self.findings += exchange.findings


def examine_local_ranks(*, ranks: int | None = None, seconds: float = 30.0) -> DoctorReport:
    """Examine this machine, then let `ranks` local ranks exchange messages for at most `seconds`: on CPU, and on GPUs
    if there are any. By default `ranks` is the number of GPUs (without GPUs, of cores), at least 2 and at most 4."""
    machine = machine_facts()
    size = ranks or max(2, min(4, len(machine.gpus) or machine.cores))
    report = DoctorReport(machine, list(examine_machine(machine, ranks=size)))
    if report.healthy:
        for device in ("cpu", "cuda") if machine.gpus else ("cpu",):
            try:
                report.add(run(size, _exchange_in_time, args=(seconds,), device=device)[0])
            except (RuntimeError, OSError, ValueError) as error:
                report.findings.append(_failure(f"{size} local ranks on {device}", error))
    return report


def examine_job(*, seconds: float = 10.0) -> DoctorReport:
    """Examine this machine as one rank of a job under torchrun. Every rank calls this function. Reaching the store and
    the roll call may take `seconds` each; connecting and exchanging messages may take three times as long each."""
    machine = machine_facts()
    if (error := launch_error(os.environ)) is not None:
        return DoctorReport(machine, [problem(error[0], remedy=error[1])])
    size, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    report = DoctorReport(machine, list(examine_machine(machine, ranks=here)))
    store = _call_roll(report, size, seconds) if size > 1 else None
    if not report.healthy:
        return report
    try:
        with _deadline(3 * seconds, "connecting"):
            world = connect()
        report.add(_exchange_in_time(world, 3 * seconds))
    except (RuntimeError, OSError, ValueError) as problem_of_rank:
        report.findings.append(_failure(f"rank {os.environ['RANK']}", problem_of_rank))
    del store  # it had to stay open until here, because the ranks connect through it
    return report


def _call_roll(report: DoctorReport, size: int, seconds: float) -> object | None:
    """Reach the store of the job, call the roll there, and add the problems between the ranks to the report. Return the
    store, or None if it cannot be reached."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = os.environ["RANK"] == "0" and not is_opened_by_launcher()
    if found := check_port(port) if opens else check_reachable(address, port=port, seconds=seconds):
        report.findings.append(found)
        return None
    facts = {**dict(report.machine.software), "device": "cuda" if report.machine.gpus else "cpu"}
    try:
        entries, store = roll_call(facts, seconds=seconds)
    except RuntimeError as error:
        report.findings.append(_failure(f"the store of the job at {address}:{port}", error))
        return None
    report.findings += examine_roll_call(entries, size=size, seconds=seconds)
    return store


def _exchange_in_time(world: World, seconds: float) -> PairMessages:
    """Exchange messages; end this process with a message if the exchange takes longer than `seconds`."""
    with _deadline(seconds, "exchanging messages", world):
        return exchange_messages(world)


@contextlib.contextmanager
def _deadline(seconds: float, doing: str, world: World | None = None) -> Iterator[None]:
    """End this process with a message if the block takes longer: a rank in a collective cannot be stopped otherwise."""

    def give_up() -> None:
        rank = os.environ.get("RANK", "0")
        at = f" at {world.flight_recorder.position.record}" if world is not None else ""
        print(  # noqa: T201 - the process ends in the next line, before its caller could print
            f"rank {rank} made no progress for {seconds:g} s while {doing}{at}: the ranks reached the store of the job "
            "but not each other; open all ports between the machines, or name the interface in GLOO_SOCKET_IFNAME",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _failure(what: str, error: Exception) -> MachineFinding:
    """Return the first line of an error as a problem, with the first remedy of `_REMEDIES` whose word it contains."""
    text = (str(error) or type(error).__name__).strip()
    remedies = [remedy for word, remedy in _REMEDIES["errors"].items() if word.lower() in text.lower()]
    remedy = remedies[0] if remedies else "read the output above, from the rank that ended first"
    return problem(f"{what} failed: {text.splitlines()[0]}", remedy=remedy)
