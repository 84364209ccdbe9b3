"""Open the key-value store of a job, give each attempt its own keys, and list the ranks that have joined.

torch's stores listen on every interface, and any process that can connect may write into them. If MASTER_ADDR is a
loopback address, the store here listens on the loopback interface alone. Otherwise torch's store is used unchanged.

The ranks of an attempt agree on a new prefix for their keys (`unused_store`): docs/faults.md says why and how
("Network"). The number of the restart would not do, because launchers of several machines may count differently.

Ranks can only connect when all have started, with the same world size and the same software. Otherwise torch waits or
fails with an unclear error. `roll_call` shows the cause before: every rank gets a list of the ranks that are there."""

import ctypes
import errno
import functools
import ipaddress
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without declaring it
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from meshwise.comm.api.launcher_info import host_identity, launched_rank

LOOPBACK = "127.0.0.1"
"""Address of the loopback interface, which only processes of this machine can reach."""

_TIME = timedelta(minutes=10)
_POLL_SECONDS = 0.05
_ACCEPT_SECONDS = 0.01  # between two looks at who has accepted a prefix
_GRACE_SECONDS = 3.0


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an address of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(host: str) -> str:
    """Return this machine's own address on the interface that leads to `host`. Raises OSError without a route."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: the system only chooses the interface
        return str(probe.getsockname()[0])


def loopback_store(port: int = 0, *, timeout: timedelta = _TIME) -> TCPStore:
    """Open a store in this process on the loopback interface, and return it. port: 0 for any free port. timeout: for
    operations of the store. Raises OSError when the port is in use."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(socket.SOMAXCONN)
        number = listening.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            number,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
    _opened().add(store)
    return store


@functools.cache
def _opened() -> weakref.WeakSet[TCPStore]:
    """Return the stores that this process has opened. The destructor of a store waits for the store's thread. A fork of
    the process, such as a data worker, has no such thread, so the destructor would end it with a segmentation fault.
    So in a fork each store gets one more reference, and is never destroyed."""
    stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()

    def keep() -> None:
        for store in stores:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    os.register_at_fork(after_in_child=keep)
    return stores


def store_of(host: str, *, port: int, opens: bool, timeout: timedelta = _TIME) -> TCPStore:
    """Return the store at `host` and `port`. opens: True if this process opens the store; on loopback, it connects
    instead if the port is in use. Raises DistError (torch) for a store out of reach, OSError if opening fails."""
    if opens and is_loopback(host):
        try:
            return loopback_store(port, timeout=timeout)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            opens = False
    return TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timeout, multi_tenant=True)


class LoopbackRendezvous(StaticTCPRendezvous):
    """Rendezvous handler for torch's elastic launcher on one machine, with a store on the loopback interface. Every
    start of the ranks gets a new store, so keys of earlier starts cannot disturb restarted ranks. run: name of the job,
    which the ranks see as TORCHELASTIC_RUN_ID."""

    def __init__(self, run: str) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=run, timeout=int(_TIME.total_seconds()))

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store and return it at once, as node 0 of 1: there is no other launcher."""
        self._store = store = loopback_store()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def shutdown(self) -> bool:
        """Drop the store, and return True for success."""
        self._store = None
        return True


def is_opened_by_launcher() -> bool:
    """Return whether the launcher has opened the store at MASTER_ADDR and MASTER_PORT; else rank 0 has to open it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class RollCallEntry:
    """Entry of one rank in a roll call."""

    rank: int
    size: int
    """WORLD_SIZE of the process."""
    facts: Mapping[str, str]
    """Facts that should be equal on all ranks, such as versions, by name."""


def roll_call(facts: Mapping[str, str], *, seconds: float = 10.0) -> tuple[list[RollCallEntry], Store]:
    """Write this rank's entry to the store at MASTER_ADDR and MASTER_PORT. Return the entries there, sorted by rank,
    and the store. Keep the store until the ranks are connected: they connect through the server of rank 0.

    Every rank calls this function. It returns when all entries are there, at the latest a few seconds after `seconds`.
    Rank 0 opens the store, unless torchrun has. Raises as `store_of` does. `facts`: see `RollCallEntry`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store_at_master(rank, timeout=timedelta(seconds=seconds + _GRACE_SECONDS))
    roll = PrefixStore(f"meshwise/roll call/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    roll.set(f"entry/{roll.add('count', 1)}", json.dumps(asdict(RollCallEntry(rank, size, dict(facts)))))
    if rank == 0:
        all_there = lambda: len(here := _present(roll)) >= max((entry.size for entry in here), default=1)  # noqa: E731
        _await(all_there, until=time.monotonic() + seconds)
        entries = _present(roll)
        roll.set("all", json.dumps([asdict(entry) for entry in entries]))
    else:
        listed = _await(lambda: roll.check(["all"]), until=time.monotonic() + seconds + _GRACE_SECONDS)
        entries = [RollCallEntry(**entry) for entry in json.loads(roll.get("all"))] if listed else _present(roll)
    roll.add("read", 1)
    if rank == 0:
        _await(lambda: roll.add("read", 0) >= len(entries), until=time.monotonic() + _GRACE_SECONDS)
    return sorted(entries, key=lambda entry: entry.rank), store


def _present(roll: Store) -> list[RollCallEntry]:
    keys = [f"entry/{ticket}" for ticket in range(1, roll.add("count", 0) + 1)]
    return [RollCallEntry(**json.loads(roll.get(key))) for key in keys if roll.check([key])]


def _await(condition: Callable[[], bool], *, until: float) -> bool:
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def job_store() -> Store | None:
    """Return the store of the job, with a prefix that no earlier start of the job has used. Every rank calls it. The
    store is at MASTER_ADDR and MASTER_PORT; None without a launcher, or for a world of one rank. Raises ValueError when
    the environment is incomplete, torch's DistError when the store cannot be reached for ten minutes, TimeoutError when
    ranks are missing."""
    rank, size = launched_rank() or (0, 1)
    if size == 1:
        return None
    return unused_store(_store_at_master(rank, timeout=_TIME), rank=rank, size=size)


def _store_at_master(rank: int, *, timeout: timedelta) -> TCPStore:
    opens = rank == 0 and not is_opened_by_launcher()
    return store_of(os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), opens=opens, timeout=timeout)


def unused_store(store: Store, *, rank: int, size: int, timeout: timedelta = _TIME) -> Store:
    """Return `store` with a prefix that no earlier attempt has used. Every rank of the attempt calls this function.
    When ranks are missing for `timeout`, rank 0 raises TimeoutError with their numbers. Another rank raises torch's
    DistError if rank 0 offers it no prefix within `timeout`."""
    desk = PrefixStore("meshwise/attempts", store)
    ticket = desk.add("tickets", 1)
    if rank:
        desk.set(f"who/{ticket}", f"{rank} of {size}")
        desk.wait([f"offer/{ticket}"], timeout)
        name = desk.get(f"offer/{ticket}").decode()
        desk.set(f"{name}/{rank}", "")
        return PrefixStore(name, desk)
    name = f"attempt {ticket}"
    _gather(desk, name, size=size, until=time.monotonic() + timeout.total_seconds())
    return PrefixStore(name, desk)


def _gather(desk: Store, name: str, *, size: int, until: float) -> None:
    """Offer the prefix `name` from rank 0 until every other rank has accepted."""
    wanted = {f"{rank} of {size}" for rank in range(1, size)}
    missing, read = set(range(1, size)), set[int]()
    while missing:
        unread = set(range(1, desk.add("tickets", 0) + 1)) - read
        for ticket in [ticket for ticket in sorted(unread) if desk.check([f"who/{ticket}"])]:
            read.add(ticket)
            if desk.get(f"who/{ticket}").decode() in wanted:
                desk.set(f"offer/{ticket}", name)
        missing = {rank for rank in missing if not desk.check([f"{name}/{rank}"])}
        if time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not join in time; look for their errors")
        time.sleep(_ACCEPT_SECONDS if missing else 0)


def on_one_host(store: Store, *, rank: int, size: int) -> bool:
    """Return whether `host_identity` is equal on all ranks. Every rank calls this function, over the same `store`."""
    store.set(f"host/{rank}", host_identity())
    return len(set(store.multi_get([f"host/{other}" for other in range(size)]))) == 1
