"""Collect which ranks are present before they connect.

Connecting needs every rank, the right size and the same software everywhere, and when something is missing it waits or
breaks off in the middle of torch. A roll call only needs the store of the job. Each rank that reaches it writes its
entry; rank 0 waits until all have or the time is up; then all read the same list.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from meshwise.comm.network.loopback import is_opened_by_launcher, store_of

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class RollCallEntry:
    """Entry of one process: its rank, the world size it was given, and facts to compare."""

    rank: int
    size: int
    facts: Mapping[str, str]


@dataclass(frozen=True)
class RollCall:
    """The entries of everyone who came in time, in the order of the ranks. It keeps rank 0's store open."""

    entries: tuple[RollCallEntry, ...]
    store: Store


def roll_call(facts: Mapping[str, str], *, seconds: float = 10.0) -> RollCall:
    """Write this rank's entry to the store that MASTER_ADDR and MASTER_PORT name, and read everyone's.

    Takes as long as the last rank does to come, at most `seconds`. Raises torch's DistError when the store cannot be
    reached (or, on rank 0 without torchrun, opened).
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store_of(
        os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        opens=rank == 0 and not is_opened_by_launcher(),
        timeout=timedelta(seconds=seconds + _GRACE_SECONDS),
    )
    roll = PrefixStore(f"meshwise/roll call/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    roll.set(f"entry/{roll.add('count', 1)}", json.dumps(asdict(RollCallEntry(rank, size, dict(facts)))))
    if rank == 0:
        entries = _await_all(roll, size, until=time.monotonic() + seconds)
        roll.set("all", json.dumps([asdict(entry) for entry in entries]))
    else:
        entries = _await_list(roll, until=time.monotonic() + seconds + _GRACE_SECONDS)
    roll.add("read", 1)
    if rank == 0:
        _await(lambda: roll.add("read", 0) >= len(entries), until=time.monotonic() + _GRACE_SECONDS)
    return RollCall(tuple(sorted(entries, key=lambda entry: entry.rank)), store)


def _await_all(roll: Store, size: int, *, until: float) -> list[RollCallEntry]:
    """Rank 0's part: the entries of as many ranks as anyone expects, or of those that came in time."""

    def complete() -> bool:
        entries = _present(roll)
        return len(entries) >= max(size, *(entry.size for entry in entries))

    _await(complete, until=until)
    return _present(roll)


def _await_list(roll: Store, *, until: float) -> list[RollCallEntry]:
    """Return the other ranks' part: rank 0's list, or without rank 0 what there is."""
    if _await(lambda: roll.check(["all"]), until=until):
        return [RollCallEntry(**entry) for entry in json.loads(roll.get("all"))]
    return _present(roll)


def _present(roll: Store) -> list[RollCallEntry]:
    keys = [f"entry/{ticket}" for ticket in range(1, roll.add("count", 0) + 1)]
    return [RollCallEntry(**json.loads(roll.get(key))) for key in keys if roll.check([key])]


def _await(condition: Callable[[], bool], *, until: float) -> bool:
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True
