"""Find out which ranks of a job have started, before they connect.

Ranks can only connect when all have started, with the same world size and the same software. Otherwise torch waits or
fails with an unclear error. A roll call only needs the store of the job. Each rank writes its entry. Rank 0 waits for
all entries, but not longer than a limit. It then writes a list of the entries, which all ranks read."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from meshwise.comm.network.loopback_store import is_opened_by_launcher, store_of

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class RollCallEntry:
    """Entry of one rank in a roll call."""

    rank: int
    size: int
    """WORLD_SIZE of the process."""
    facts: Mapping[str, str]
    """Facts that should be equal on all ranks, such as versions, by name."""


@dataclass(frozen=True)
class RollCall:
    """Result of a roll call."""

    entries: Sequence[RollCallEntry]
    """Ordered by rank."""
    store: Store
    """Store of the job. Keep it until the ranks are connected: they do this through the server that rank 0 opened."""


def roll_call(facts: Mapping[str, str], *, seconds: float = 10.0) -> RollCall:
    """Write this rank's entry to the store at MASTER_ADDR and MASTER_PORT, and return the entries of all ranks. Every
    rank calls this function. It returns when all ranks have come, or a few seconds after `seconds` at
    the latest. Rank 0 opens the store, unless torchrun has. Raises torch's DistError or OSError if it cannot be reached
    or opened."""
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
        _await(lambda: _is_complete(_present(roll)), until=time.monotonic() + seconds)
        entries = _present(roll)
        roll.set("all", json.dumps([asdict(entry) for entry in entries]))
    else:
        listed = _await(lambda: roll.check(["all"]), until=time.monotonic() + seconds + _GRACE_SECONDS)
        entries = [RollCallEntry(**entry) for entry in json.loads(roll.get("all"))] if listed else _present(roll)
    roll.add("read", 1)
    if rank == 0:
        _await(lambda: roll.add("read", 0) >= len(entries), until=time.monotonic() + _GRACE_SECONDS)
    return RollCall(sorted(entries, key=lambda entry: entry.rank), store)


def _present(roll: Store) -> list[RollCallEntry]:
    keys = [f"entry/{ticket}" for ticket in range(1, roll.add("count", 0) + 1)]
    return [RollCallEntry(**json.loads(roll.get(key))) for key in keys if roll.check([key])]


def _is_complete(entries: Sequence[RollCallEntry]) -> bool:
    """Return whether as many ranks have come as the largest world size that any of them names."""
    return len(entries) >= max((entry.size for entry in entries), default=1)


def _await(condition: Callable[[], bool], *, until: float) -> bool:
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True
