"""Check that this machine can train and that its ranks can communicate, and report the reason when they cannot.

    | 1  examine the machine: software, cores, memory, GPUs, links, limits
    | 2  under torchrun: reach the store of the job, where each rank registers; report ranks that are missing or differ
    | 3  connect the ranks of the job (or start local ranks), and let every pair of ranks exchange messages

Step 3 only runs if the steps before found no problem. Every step that waits for other ranks has a short time limit,
because the ordinary time limits of a job are too long for a check."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwise.bench.diagnosis import MachineFinding, examine_machine, examine_roll_call, own_facts, problem
from meshwise.bench.machine import Machine, machine_facts
from meshwise.bench.pair_messages import PairMessages, exchange_messages, slow_links
from meshwise.comm import World, connect, run
from meshwise.comm.api.launch_environment import launch_error
from meshwise.comm.health.roll_call import RollCall, roll_call
from meshwise.comm.network.loopback_store import is_opened_by_launcher

_RETRY_SECONDS = 0.2


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
        """Add an exchange of messages, its findings, and notes on its slow links."""
        self.exchanges.append(exchange)
        self.findings += [*exchange.findings, *slow_links(exchange.links)]


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
    """Examine this machine as one rank of a job under torchrun. Every rank calls it. Reaching the store and the roll
    call may take `seconds` each; connecting and exchanging messages may take three times as long each."""
    machine = machine_facts()
    if (error := launch_error(os.environ)) is not None:
        return DoctorReport(machine, [problem(error[0], remedy=error[1])])
    size = int(os.environ["WORLD_SIZE"])
    findings = list(examine_machine(machine, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    report = DoctorReport(machine, findings)
    called = _call_roll(report, size, seconds) if size > 1 else None
    if not report.healthy:
        return report
    try:
        with _deadline(3 * seconds, "connecting"):
            world = connect()
        report.add(_exchange_in_time(world, 3 * seconds))
    except (RuntimeError, OSError, ValueError) as problem_of_rank:
        report.findings.append(_failure(f"rank {os.environ['RANK']}", problem_of_rank))
    del called  # until here it has kept the store open, through which the ranks connect
    return report


def _call_roll(report: DoctorReport, size: int, seconds: float) -> RollCall | None:
    """Reach the store of the job, call the roll there, and add the problems between the ranks to the report. Return the
    roll call, or None without a store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = os.environ["RANK"] == "0" and not is_opened_by_launcher()
    if found := check_port(port) if opens else check_reachable(address, port=port, seconds=seconds):
        report.findings.append(found)
        return None
    facts = own_facts(report.machine, device="cuda" if report.machine.gpus else "cpu")
    try:
        called = roll_call(facts, seconds=seconds)
    except RuntimeError as error:
        report.findings.append(_failure(f"the store of the job at {address}:{port}", error))
        return None
    report.findings += examine_roll_call(called.entries, size=size, seconds=seconds)
    return called


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


_REMEDIES = (
    ("interface", "name an interface that exists, and that the other machines can reach, in GLOO_SOCKET_IFNAME"),
    ("resolve", "add this machine's host name to /etc/hosts, or name its interface in GLOO_SOCKET_IFNAME"),
    ("NCCL", "run again with NCCL_DEBUG=WARN, and compare drivers and NCCL versions"),
    ("Permission", "allow this user to open sockets and start processes here"),
    ("timed out", "look at the output of the other ranks, and open all ports between their machines"),
)


def _failure(what: str, error: Exception) -> MachineFinding:
    """Return the first line of an error as a problem, with the first remedy of `_REMEDIES` whose word it contains."""
    text = (str(error) or type(error).__name__).strip()
    remedies = [remedy for word, remedy in _REMEDIES if word.lower() in text.lower()]
    remedy = remedies[0] if remedies else "read the output above, from the rank that ended first"
    return problem(f"{what} failed: {text.splitlines()[0]}", remedy=remedy)
