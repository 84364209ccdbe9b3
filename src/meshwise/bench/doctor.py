"""Can this machine train, can the ranks talk, and if not, why not.

    | 1  look at the machine: software, cores, memory, GPUs, links, limits
    | 2  under torchrun: reach the meeting place and call the roll, so that a missing or different rank has a name
    | 3  connect the ranks that are there (or local ones, started here) and let every pair talk

Each step only runs when the one before found no problem. A step that takes too long is ended with a message that says
where. The ordinary time limits of a job are too long for a check.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.bench.diagnosis import examine_machine, examine_roll, own_facts
from meshwise.bench.finding import MachineFinding, problem
from meshwise.bench.machine import Machine, examine
from meshwise.bench.pair_talk import PairTalks, slow_links, talk
from meshwise.comm import World, connect, run
from meshwise.comm.api.launch_environment import launch_error
from meshwise.comm.health.roll_call import roll_call

_RETRY_SECONDS = 0.2


def check_environment(environment: Mapping[str, str]) -> list[MachineFinding]:
    """Return findings for variables that a launcher must set, as torchrun does."""
    wrong = launch_error(environment)
    return [] if wrong is None else [problem(wrong[0], remedy=wrong[1])]


def reach(address: str, *, port: int, seconds: float) -> list[MachineFinding]:
    """Try the meeting place until it answers or the time is up. No findings when it answers."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return [
            problem(
                f"the name of the meeting place, MASTER_ADDR={address}, does not resolve on this machine",
                remedy="give torchrun --rdzv-endpoint an IP address, or add the name to /etc/hosts or the DNS",
            )
        ]
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(left, _RETRY_SECONDS)):
                return []
        except OSError as error:
            reason = error
        if time.monotonic() + _RETRY_SECONDS > until:
            return [_unreachable(address, port, reason, seconds)]
        time.sleep(_RETRY_SECONDS)


def can_open(port: int) -> list[MachineFinding]:
    """Return a finding if rank 0 cannot open the port and no launcher keeps the store."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return [
                problem(
                    f"rank 0 cannot open port {port}: {os.strerror(error.errno or 0).lower()}",
                    remedy="choose another MASTER_PORT on all ranks, or end the process that has it",
                )
            ]
    return []


def _unreachable(address: str, port: int, error: OSError, seconds: float) -> MachineFinding:
    where = f"{address}:{port}"
    if isinstance(error, ConnectionRefusedError):
        return problem(
            f"nothing listens at {where} (refused for {seconds:g} s)",
            remedy="start rank 0 on that machine first, and give all ranks the same MASTER_PORT",
        )
    return problem(
        f"{where} does not answer within {seconds:g} s ({error})",
        remedy=f"open port {port} in the firewall between the machines, or choose an address both can route to",
    )


@dataclass(frozen=True)
class DoctorReport:
    """Report of the doctor. `talks`: one conversation for each kind of device that was tried."""

    machine: Machine
    talks: tuple[PairTalks, ...]
    findings: tuple[MachineFinding, ...]

    @property
    def healthy(self) -> bool:
        """True if there is no problem."""
        return all(finding.level != "problem" for finding in self.findings)


def consult_local(*, ranks: int | None = None, seconds: float = 30.0) -> DoctorReport:
    """Start local ranks (by default as many as cores or GPUs, 2 to 4) and let them talk; on CPU, and on GPUs if any."""
    machine = examine()
    size = ranks or max(2, min(4, len(machine.gpus) or machine.cores))
    findings = examine_machine(machine, ranks=size)
    talks = []
    if all(finding.level != "problem" for finding in findings):
        for device in ("cpu", "cuda") if machine.gpus else ("cpu",):
            try:
                talks.append(run(size, _talk_in_time, args=(seconds,), device=device)[0])
            except (RuntimeError, OSError, ValueError) as error:
                findings.append(_failed(f"{size} local ranks on {device}", error))
    return _report(machine, talks, findings)


def consult_job(*, seconds: float = 10.0) -> DoctorReport:
    """Return one rank's part under torchrun: reach the meeting place, call the roll, connect, talk.

    Takes `seconds` at most for each step that waits for others.
    """
    machine = examine()
    findings = [*check_environment(os.environ)]
    if not findings:
        size = int(os.environ["WORLD_SIZE"])
        findings += examine_machine(machine, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        findings += _meet(machine, size, seconds) if size > 1 else []
    if any(finding.level == "problem" for finding in findings):
        return _report(machine, [], findings)
    try:
        with _deadline(3 * seconds, "connecting"):
            world = connect()
        return _report(machine, [_talk_in_time(world, 3 * seconds)], findings)
    except (RuntimeError, OSError, ValueError) as error:
        return _report(machine, [], [*findings, _failed(f"rank {os.environ['RANK']}", error)])


def _meet(machine: Machine, size: int, seconds: float) -> list[MachineFinding]:
    """Reach the meeting place and call the roll."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens_it = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if found := can_open(port) if opens_it else reach(address, port=port, seconds=seconds):
        return found
    facts = own_facts(machine, device="cuda" if machine.gpus else "cpu")
    try:
        roll = roll_call(facts, seconds=seconds)
    except RuntimeError as error:
        return [_failed(f"the meeting place {address}:{port}", error)]
    return examine_roll(roll.entries, size=size, seconds=seconds)


def _talk_in_time(world: World, seconds: float) -> PairTalks:
    """`talk`, or the end of this process with a sentence that says where it stood."""
    with _deadline(seconds, "talking", world):
        return talk(world)


@contextlib.contextmanager
def _deadline(seconds: float, doing: str, world: World | None = None) -> Iterator[None]:
    """End the process when the block takes longer: a rank that waits inside a collective cannot be asked to stop."""

    def give_up() -> None:
        rank = os.environ.get("RANK", "0")
        at = f" at {world.journal.position.stamp}" if world is not None else ""
        print(  # noqa: T201 - nobody else is left to say it
            f"rank {rank} stood still for {seconds:g} s while {doing}{at}: the ranks reached the meeting place but not "
            "one another; open all ports between the machines, or name the interface in GLOO_SOCKET_IFNAME",
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


def _failed(who: str, error: Exception) -> MachineFinding:
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    return problem(f"{who} failed: {first}", remedy=_remedy(str(error)))


_REMEDIES = (
    ("interface", "name an interface that exists, and that the other machines can reach, in GLOO_SOCKET_IFNAME"),
    ("resolve", "add this machine's host name to /etc/hosts, or name its interface in GLOO_SOCKET_IFNAME"),
    ("NCCL", "run again with NCCL_DEBUG=WARN, and compare drivers and NCCL versions"),
    ("Permission", "allow this user to open sockets and start processes here"),
    ("timed out", "look at the output of the other ranks, and open all ports between their machines"),
)


def _remedy(text: str) -> str:
    """Return the advice for the first word of the table that the error has."""
    for word, remedy in _REMEDIES:
        if word.lower() in text.lower():
            return remedy
    return "look at the output above it, from the rank that ended first"


def _report(machine: Machine, talks: Sequence[PairTalks], findings: Sequence[MachineFinding]) -> DoctorReport:
    told = list(findings)
    for held in talks:
        told += held.findings
        told += [
            MachineFinding(
                "note",
                f"ranks {link.ranks[0]} and {link.ranks[1]} exchange {link.bandwidth / 1e9:.2f} GB/s, "
                "less than a quarter of what the others do",
                "look at that link, its cable, and what else uses it",
            )
            for link in slow_links(held.links)
        ]
    return DoctorReport(machine, tuple(talks), tuple(told))
