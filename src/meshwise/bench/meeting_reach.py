"""Check whether this rank can reach the address where the job meets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from meshwise.bench.finding import MachineFinding, problem
from meshwise.comm.api.launch_environment import launch_error

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
