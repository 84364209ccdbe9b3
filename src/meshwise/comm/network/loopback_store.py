"""Open the key-value store of a job on the loopback interface if all ranks are on this machine.

torch's stores listen on every interface of a machine, and any process that can connect may write into them. If
MASTER_ADDR is a loopback address, the store here gets a socket that is bound to the loopback interface. For any other
address torch's store is used unchanged."""

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
"""Address of the loopback interface, which only processes of this machine can reach."""

_TIME = timedelta(minutes=10)


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an address of the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """Return the set of stores that this process has opened. A store joins its thread when it is collected. A fork of
    the process, such as a data worker, has no such thread, and died of a segmentation fault. So a fork never collects
    the stores: each gets one more reference there."""
    stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()

    def keep() -> None:
        for store in stores:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    os.register_at_fork(after_in_child=keep)
    return stores


def store_of(host: str, *, port: int, opens: bool, timeout: timedelta = _TIME) -> TCPStore:
    """Return the store at `host` and `port`. opens: True if this process opens the store, unless the port is in use
    already: then it connects. Raises torch's DistError if it cannot be reached, OSError if not opened."""
    if opens and is_loopback(host):
        try:
            return loopback_store(port, timeout=timeout)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            opens = False
    return TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timeout, multi_tenant=True)


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous handler for torch's elastic launcher on one machine, with a store on the loopback interface. Every
    start of the ranks gets a new store, so keys of earlier starts cannot disturb restarted ranks. run: name of the job.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        """Return the name of this rendezvous for torch's records."""
        return "meshwise-loopback"

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the store that the launcher opened."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store and return it at once, as node 0 of 1: there is no other launcher."""
        self._store = loopback_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Return whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Note that there will be no further start of the ranks."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job, which the ranks see as TORCHELASTIC_RUN_ID."""
        return self._run

    def shutdown(self) -> bool:
        """Drop the store, and return True for success."""
        self._store = None
        return True


def is_opened_by_launcher() -> bool:
    """Return whether the launcher has opened the store at MASTER_ADDR and MASTER_PORT; else rank 0 has to open it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
