"""One job on two hosts survives the loss of one: network namespaces where the system lets us make them, else two
launchers that meet on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from free_port import free_port

pytestmark = pytest.mark.processes

STEPS = 60
SECONDS = 200.0
NETWORK = "10.213.7"

# With less, a machine with other work to do gives up a host, or a rank, that is only slow; the job notices the lost one
# as late. The last call ends when both hosts are there, and has to be waited for in full by the one that is left.
STALL_SECONDS = 20.0
ELASTIC = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=10"
OWN = """
import time
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        time.sleep(0.05)
        return self.head(self.embedding(tokens))
"""


@dataclass
class Host:
    """A machine, real or not: how a command is run there, and its address."""

    prefix: list[str]
    address: str


def _does(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _ip(*words: str) -> bool:
    return _does("ip", *words)


def _joined(names: list[str]) -> bool:
    """Make a namespace for each name and a cable between them. False where the system lets us do only a part of it."""
    lines = [*(f"netns add {name}" for name in names)]
    lines.append("link add cable netns {} type veth peer name cable netns {}".format(*names))
    for number, name in enumerate(names, start=1):
        lines.append(f"-n {name} addr add {NETWORK}.{number}/24 dev cable")
        lines += [f"-n {name} link set {device} up" for device in ("cable", "lo")]
    return all(_ip(*line.split()) for line in lines)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two of them, joined by a cable."""
    names = [f"mw{os.getpid()}{letter}" for letter in "ab"]
    made = []
    for number, name in enumerate(names, start=1):
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
        made.append(Host(["ip", "netns", "exec", name, *named], f"{NETWORK}.{number}"))
    has_ip = shutil.which("ip") is not None
    try:
        if has_ip and _joined(names) and all(_does(*host.prefix, "true") for host in made):
            yield made
        else:
            yield [Host([], "127.0.0.1"), Host([], "127.0.0.1")]
    finally:
        for name in names if has_ip else ():
            _ip("netns", "del", name)


def launch(host: Host, folder: Path, *, endpoint: str, meets: bool) -> subprocess.Popen[bytes]:
    """One torchrun, as on any cluster, with one rank. `meets`: whether the hosts meet at this one."""
    torchrun = [
        *["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"],
        *[f"--rdzv-endpoint={endpoint}", f"--local-addr={host.address}", f"--rdzv-conf=is_host={int(meets)},{ELASTIC}"],
        "--monitor-interval=0.2",
    ]
    job = [
        *["train", "--model.name=own.py:Own", "--data.files", "text.txt", "--data.cache=cache", "--data.context=16"],
        *["--data.validation=0", "--plan=dp=auto zero=2", "--train.batch=8", f"--train.steps={STEPS}"],
        *["--train.save-every=2", "--train.output=run"],
    ]
    words = [*host.prefix, sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "meshwise", *job]
    with (folder / f"log-{host.address}-{len(list(folder.iterdir()))}").open("wb") as log:
        environment = os.environ | {"MESHWISE_STALL_SECONDS": str(STALL_SECONDS)}
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def lose(process: subprocess.Popen[bytes], host: Host) -> None:
    """Everything of that host at once: first its cable, so that nobody is told that its connections end."""
    if host.prefix:
        _ip("-n", host.prefix[3], "link", "set", "cable", "down")
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for pid, parent in (map(int, row.split()) for row in rows.splitlines()):
        children.setdefault(parent, []).append(pid)
    doomed = [process.pid]
    for pid in doomed:
        doomed += children.get(pid, [])
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGKILL)
    process.wait()


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )


@pytest.mark.timeout(600)
def test_one_of_two_hosts_is_lost_and_the_job_goes_on_by_itself(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    endpoint = f"{hosts[0].address}:{free_port()}"
    one = launch(hosts[0], tmp_path, endpoint=endpoint, meets=True)
    other = launch(hosts[1], tmp_path, endpoint=endpoint, meets=False)
    try:
        ends = time.monotonic() + SECONDS
        while not any(event["event"] == "saved" and event["step"] >= 6 for event in events(tmp_path)):
            assert time.monotonic() < ends, _logs(tmp_path)
            assert one.poll() is None, _logs(tmp_path)
            time.sleep(0.1)
        lose(other, hosts[1])
        assert one.wait(SECONDS) == 0, _logs(tmp_path)
    finally:
        for process, host in zip((one, other), hosts, strict=True):
            if process.poll() is None:
                lose(process, host)

    said = events(tmp_path)
    assert [event["plan"] for event in said if event["event"] == "start"] == ["dp=2 zero=2", "zero=2"]
    [resume] = [event for event in said if event["event"] == "resume"]
    assert resume["step"] >= 6
    assert resume["changes"] == ["plan: 'dp=2 zero=2' -> 'zero=2'"]
    losses: dict[int, list[float]] = {}
    for event in said:
        if event["event"] == "step":
            losses.setdefault(event["step"], []).append(event["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    for step, found in losses.items():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-5), f"step {step} was done twice, alike"
    assert {path.name for path in tmp_path.glob("run*")} == {"run"}, "it went on in its own folder"


def _logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log-*")))
