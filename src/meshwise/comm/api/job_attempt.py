"""Find out which start of a job this is, when a launcher starts its ranks again.

A launcher that restarts ranks may keep its store, with everything that the earlier ranks wrote. It also numbers its
restarts on its own, so launchers of several machines may count differently. So the ranks agree on a name that no
earlier start had, with a ticket each:

    | every rank      takes a ticket, a number nobody has had, and writes its rank under it
    | rank 0          offers the name made of its own ticket to every ticket it finds
    | the others      accept what is offered to their own ticket
    | rank 0          goes on when every rank has accepted

The ticket of a lost rank receives the offer too, and does not answer.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import distributed_c10d as c10d

_POLL_SECONDS = 0.01
_TIME = timedelta(minutes=10)


@dataclass(frozen=True)
class JobAttempt:
    """One start of a job's ranks, as the launcher describes it. run: the name of the job, the same after a restart;
    number: 0 for the first start.
    """

    run: str
    number: int = 0
    most: int = 0

    @classmethod
    def current(cls) -> "JobAttempt | None":
        """Return the attempt of this process, or None when no elastic launcher has started it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(os.environ["TORCHELASTIC_RUN_ID"], number, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")))

    @property
    def is_named(self) -> bool:
        """True if the name is this job's own: torchrun calls every job `none` that was given no name."""
        return self.run != "none"


def fresh(store: c10d.Store, *, rank: int, size: int, timeout: timedelta = _TIME) -> c10d.Store:
    """Return a part of the store that no earlier start has written to; every rank calls it.

    Raises TimeoutError (on rank 0, which names them) or torch's DistError when ranks stay away for `timeout`.
    """
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
    """Rank 0's part: offer the name until every other rank has accepted."""
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
