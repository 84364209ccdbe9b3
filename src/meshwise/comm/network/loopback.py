"""Open the stores of a job so that no other machine can reach them unless it has to.

torch's stores listen on every interface of a machine, and any process that reaches one can write into it. A job whose
ranks are all here needs none of that: its stores are given a socket that is bound to the loopback interface already. A
store that other machines must reach has a named host, and stays torch's.
"""

import ctypes
import errno
import functools
import ipaddress
import os
import socket
import weakref
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without declaring it
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

LOOPBACK = "127.0.0.1"
_TIME = timedelta(minutes=10)


def is_loopback(host: str) -> bool:
    """Return whether this name or address leads to this machine and never leaves it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """Return the address of this machine on the route to `host`. Raises OSError when there is no route."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: it only chooses the interface
        return str(probe.getsockname()[0])


def loopback_store(port: int = 0, *, timeout: timedelta = _TIME) -> TCPStore:
    """Return a store of this process on the loopback interface; port 0 takes a free one. Raises OSError when it is
    taken.
    """
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
    """Return the stores of this process.

    A store that is collected ends a thread, which a forked copy of the process does not have. So the copy, a data
    worker for example, died of a segmentation fault. In a copy the stores are never collected.
    """
    stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()

    def keep() -> None:
        for store in stores:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    os.register_at_fork(after_in_child=keep)
    return stores


def store_of(host: str, *, port: int, opens: bool, timeout: timedelta = _TIME) -> TCPStore:
    """Return the store at this place; `opens`: this process opens it, unless it has done so before.

    Raises torch's DistError when it cannot be reached, OSError when it cannot be opened.
    """
    if opens and is_loopback(host):
        try:
            return loopback_store(port, timeout=timeout)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            opens = False
    return TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timeout, multi_tenant=True)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of torch's launcher on one machine. Every round has a new store, so values of earlier rounds
    cannot disturb restarted ranks.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        """Its name in torch's records."""
        return "meshwise-loopback"

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet at the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once: this launcher is the only one."""
        self._store = loopback_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Return whether there will be no further round."""
        return self._closed

    def set_closed(self) -> None:
        """There will be none."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job, in the ranks TORCHELASTIC_RUN_ID."""
        return self._run

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def is_opened_by_launcher() -> bool:
    """Return whether the launcher holds the store that MASTER_ADDR and MASTER_PORT name; else rank 0 opens it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
