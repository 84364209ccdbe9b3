"""Test that restarted ranks use a fresh part of the store, and that stores of one machine stay on it."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without declaring it

from meshwise.comm.api.launcher_info import JobAttempt
from meshwise.comm.network.job_store import (
    LoopbackRendezvous,
    address_towards,
    is_loopback,
    loopback_store,
    store_of,
    unused_store,
)
from warm_command import WarmCommand

SOON = timedelta(seconds=200)
WILDCARDS = {"00000000", "0" * 32}


def client(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=SOON)


def meet(store: TCPStore, size: int, *, last: int | None = None) -> list[str]:
    """What every rank of a start reads where rank 0 has written, `last` coming late."""

    def rank(number: int) -> str:
        if number == last:
            threading.Event().wait(0.2)
        own = unused_store(client(store), rank=number, size=size, timeout=SOON)
        if number == 0:
            assert not own.check(["word"]), "an earlier start has written here"
            own.set("word", f"of a start of {size}")
        text: bytes = own.get("word")
        return text.decode()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("last", [0, 1, None])
def test_every_start_has_a_part_of_the_store_for_itself(last: int | None) -> None:
    store = loopback_store()
    for size in (3, 3, 2):
        assert meet(store, size, last=last) == [f"of a start of {size}"] * size


def test_a_rank_that_died_while_it_waited_is_in_nobodys_way() -> None:
    store = loopback_store()
    with pytest.raises(RuntimeError):  # the rank 1 of a start whose rank 0 never came
        unused_store(client(store), rank=1, size=2, timeout=timedelta(milliseconds=100))
    assert meet(store, 2) == ["of a start of 2"] * 2


def test_ranks_that_stay_away_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3 did not join in time"):
        unused_store(loopback_store(), rank=0, size=3, timeout=timedelta(milliseconds=100))


def test_a_start_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert JobAttempt.current() is None
    for name, value in {"RUN_ID": "none", "RESTART_COUNT": "2", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert JobAttempt.current() == JobAttempt("none", 2, 3)
    assert not JobAttempt("none").is_named
    assert JobAttempt("job-7").is_named


def listening(port: int) -> set[str]:
    """The addresses, in the kernel's hexadecimal, at which somebody listens on this port."""
    rows = [row.split() for file in ("tcp", "tcp6") for row in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs the socket tables of Linux")
def test_stores_of_one_machine_listen_on_its_loopback_interface_alone() -> None:
    for store in (loopback_store(), store_of("localhost", port=0, opens=True)):
        assert listening(store.port) == {"0100007F"}
    rendezvous = LoopbackRendezvous("job")
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    ports = [round_.bootstrap_store_info.master_port for round_ in (first, second) if round_.bootstrap_store_info]
    assert len(set(ports)) == 2, "a restart gets a new store"
    assert all(listening(port) == {"0100007F"} for port in ports)


LISTENING = """
import os
from pathlib import Path
from meshwise.comm.launch.launch import run

def main(world):
    world.barrier()
    own = {os.path.basename(os.path.realpath(path))
           for pid in (os.getpid(), os.getppid()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for name in ("tcp", "tcp6")
            for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    world.barrier()
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}

print(*(address for found in run(2, main, comm="gloo") for address in found))
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs the socket tables of Linux")
def test_a_local_job_listens_nowhere_else() -> None:
    status, said, errors = WarmCommand("-c", LISTENING).end()
    assert status == 0, errors
    assert set(said.split()) == {"0100007F"}


def test_loopback_is_recognised() -> None:
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert is_loopback(host)
    for host in ("10.0.0.1", "node-7", "0.0.0.0"):
        assert not is_loopback(host)
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_port_that_is_taken_by_this_process_is_used() -> None:
    first = loopback_store()
    second = store_of("127.0.0.1", port=first.port, opens=True, timeout=SOON)
    second.set("a", "b")
    assert first.get("a") == b"b"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(RuntimeError):
            store_of("127.0.0.1", port=other.getsockname()[1], opens=True, timeout=timedelta(milliseconds=300))
