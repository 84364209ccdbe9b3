"""Distinguish the attempts of a job: after a failure a launcher starts all ranks again, and each start is an attempt.

`JobAttempt` is what the launcher says about the attempt. `unused_store` gives the ranks of an attempt an empty part of
the store. After a restart the store may still have all keys of earlier attempts. The launchers of several
machines may also number the restarts differently. So the ranks of an attempt agree on a new prefix for their keys:

    | every rank      takes a ticket, a number that no rank has had, and writes its rank under this number
    | rank 0          makes the prefix from its own ticket, and offers it to every ticket that it finds
    | other ranks     accept the prefix that is offered to their ticket
    | rank 0          returns when every rank has accepted

Tickets of ranks of an earlier attempt may receive an offer too; it is never accepted."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import distributed_c10d as c10d

_POLL_SECONDS = 0.01
_TIME = timedelta(minutes=10)


@dataclass(frozen=True)
class JobAttempt:
    """One start of a job's ranks, as the elastic launcher describes it in the environment."""

    job_name: str
    """Name of the job, equal in all attempts."""
    restarts: int = 0
    """Number of restarts before this attempt: 0 for the first."""
    max_restarts: int = 0
    """Largest number of restarts that the launcher allows."""

    @classmethod
    def current(cls) -> "JobAttempt | None":
        """Return the attempt of this process, or None when no elastic launcher has started it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(os.environ["TORCHELASTIC_RUN_ID"], number, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")))

    @property
    def is_named(self) -> bool:
        """True if the user named the job: torchrun calls every other job `none`."""
        return self.job_name != "none"


def unused_store(store: c10d.Store, *, rank: int, size: int, timeout: timedelta = _TIME) -> c10d.Store:
    """Return `store` with a prefix that no earlier attempt has used. Every rank of the attempt calls this function.
    When ranks are missing for `timeout`, rank 0 raises TimeoutError with their numbers. Another rank raises torch's
    DistError if rank 0 offers it no prefix within `timeout`."""
    desk = c10d.PrefixStore("meshwise/attempts", store)
    ticket = desk.add("tickets", 1)
    if rank:
        desk.set(f"who/{ticket}", f"{rank} of {size}")
        desk.wait([f"offer/{ticket}"], timeout)
        name = desk.get(f"offer/{ticket}").decode()
        desk.set(f"{name}/{rank}", "")
        return c10d.PrefixStore(name, desk)
    name = f"attempt {ticket}"
    _gather(desk, name, size=size, until=time.monotonic() + timeout.total_seconds())
    return c10d.PrefixStore(name, desk)


def _gather(desk: c10d.Store, name: str, *, size: int, until: float) -> None:
    """Offer the prefix `name` from rank 0 until every other rank has accepted."""
    wanted = {f"{rank} of {size}" for rank in range(1, size)}
    missing = set(range(1, size))
    unread: set[int] = set()
    read = 0
    while missing:
        tickets = desk.add("tickets", 0)
        unread |= set(range(read + 1, tickets + 1))
        read = tickets
        for ticket in [ticket for ticket in sorted(unread) if desk.check([f"who/{ticket}"])]:
            unread.discard(ticket)
            if desk.get(f"who/{ticket}").decode() in wanted:
                desk.set(f"offer/{ticket}", name)
        missing = {rank for rank in missing if not desk.check([f"{name}/{rank}"])}
        if time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not come")
        time.sleep(_POLL_SECONDS if missing else 0)
