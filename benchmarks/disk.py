"""Measure the bandwidth of a disk for tiers beside dd: reading, writing, and both at once.

    python benchmarks/disk.py --folder /nvme --gigabytes 1

dd handles one block after the other, so a disk that serves several requests at a time needs several dd processes. They
take turns with the tier's own file, on equal terms:

    | dd × n    16 MiB at a time, n that read and n that write
    | tier      pieces of 8 MiB, 4 at a time of either kind, through staging buffers

Both go past the page cache where the file system has that, and neither syncs: a direct write is on the device when it
ends. Every file is written once before anything is measured, so no contestant pays for the file system's first
allocation."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from meshwise.comm.api.streams import streams_of
from meshwise.memory.swap_file import BufferPool, SwapConfig, SwapFile, SwapTransfer, whole_blocks

KINDS = ("read", "write", "both")
TIER = "meshwise"
DDS = (1, 2, 4)
"""How many of dd there are for each kind."""

_BLOCK = 16 * 2**20
_BUFFERS = SwapConfig()


Contestant: TypeAlias = Callable[[str], None]
"""Moves all bytes of a kind."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second of one contestant, round by round."""

    who: str
    kind: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Bytes a second."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Disk:
    """The rates of a folder's disk."""

    rates: tuple[Rate, ...]
    direct: bool
    """Whether they went past the page cache."""

    def of(self, who: str, *, kind: str) -> Rate:
        """Return one rate."""
        return next(rate for rate in self.rates if (rate.who, rate.kind) == (who, kind))

    def best(self, kind: str) -> Rate:
        """Return the fastest result of dd for `kind`."""
        return max(
            (rate for rate in self.rates if rate.who != TIER and rate.kind == kind), key=lambda rate: rate.median
        )

    def share(self, kind: str) -> float:
        """Return the median ratio, over rounds, of the tier's bandwidth to the best of dd."""
        rounds = zip(self.of(TIER, kind=kind).rounds, self.best(kind).rounds, strict=True)
        return statistics.median(own / other for own, other in rounds)


def measure(folder: Path, *, size: int, rounds: int) -> Disk:
    """Read and write `size` bytes of each kind in `rounds` turns. The files that it makes in `folder` are removed.

    Raises ValueError when there is too little room, or no dd; TierError when nothing can be written there."""
    size = max(1, size // _BLOCK) * _BLOCK
    if shutil.which("dd") is None:
        raise ValueError("dd, which the tier is measured beside, is not on the PATH")
    file = SwapFile(folder)
    try:
        if (free := shutil.disk_usage(folder).free) < 4 * size:
            raise ValueError(
                f"{folder} has {free} bytes free, and four files of {size} are needed; give a smaller size"
            )
        with dds(folder, size=size, direct=file.direct) as contestants, _tier(file, size=size) as tier:
            contestants[TIER] = tier
            seconds: dict[tuple[str, str], list[float]] = {(who, kind): [] for who in contestants for kind in KINDS}
            for turn in range(rounds):
                for who, kind in list(seconds)[:: -1 if turn % 2 else 1]:
                    began = time.perf_counter()
                    contestants[who](kind)
                    seconds[who, kind].append(time.perf_counter() - began)
    finally:
        file.close()
    rates = [
        Rate(who, kind, tuple(size * (1 + (kind == "both")) / one for one in taken))
        for (who, kind), taken in seconds.items()
    ]
    return Disk(tuple(rates), file.direct)


@contextlib.contextmanager
def _tier(file: SwapFile, *, size: int) -> Iterator[Contestant]:
    """Yield a contestant that uses the tier's own path: a fixed number of staging buffers."""
    source, target = (file.place(file.allocate(size, dtype=torch.uint8)) for _ in range(2))
    streams = streams_of(torch.device("cpu"))
    each = whole_blocks(min(_BUFFERS.buffer, size))
    staging = BufferPool(_BUFFERS.buffers * each, streams=streams)

    ways = {
        "read": lambda offset, part: file.read(source + offset, into=part),
        "write": lambda offset, part: file.write(target + offset, values=part),
    }

    def move(kind: str) -> None:
        under_way: list[SwapTransfer] = []
        for low, one in itertools.product(range(0, size, each), ways):
            if kind in (one, "both"):
                buffer = staging.take(each)
                transfer = ways[one](low, buffer[: size - low])
                transfer.then(lambda buffer=buffer: staging.give(buffer))  # type: ignore[misc] # one for each
                under_way.append(transfer)
        for transfer in under_way:
            transfer.wait()

    move("write")
    source, target = target, source
    move("write")
    yield move


@contextlib.contextmanager
def dds(folder: Path, *, size: int, direct: bool) -> Iterator[dict[str, Contestant]]:
    """Each number of dd by its name: who moves `size` bytes of a kind, each with its part of the files."""
    flags = {"read": ["iflag=direct"], "write": ["oflag=direct"]} if direct else {"read": [], "write": []}
    blocks = size // _BLOCK

    def start(path: Path, kind: str, *, first: int, count: int) -> subprocess.Popen[bytes]:
        reads = kind == "read"
        ends = (
            [f"if={path}", "of=/dev/null", f"skip={first}"]
            if reads
            else ["if=/dev/zero", f"of={path}", f"seek={first}"]
        )
        words = ["dd", *ends, f"bs={_BLOCK}", f"count={count}", "conv=notrunc", *flags[kind]]
        return subprocess.Popen(words, stderr=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = Path(name)
        paths = {"read": made / "source", "write": made / "target"}

        def run(kind: str, number: int) -> None:
            bounds = [blocks * part // number for part in range(number + 1)]
            _wait(
                [
                    start(paths[one], one, first=low, count=high - low)
                    for one in paths
                    if kind in (one, "both")
                    for low, high in itertools.pairwise(bounds)
                    if low < high
                ]
            )

        for path in paths.values():
            _wait([start(path, "write", first=0, count=blocks)])
        yield {f"dd × {number}": lambda kind, number=number: run(kind, number) for number in DDS}  # type: ignore[misc]


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes. Raises OSError when one of them fails."""
    if failed := [process for process in started if process.wait()]:
        raise OSError(f"dd ended with {failed[0].returncode}: {failed[0].args!r}")


def main() -> None:
    """Measure, and print median rates in GB/s (10^9 bytes)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=1.0, help="to read and to write, of four times as much")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    disk = measure(asked.folder, size=int(asked.gigabytes * 2**30), rounds=asked.rounds)
    print(f"GB/s in {asked.folder}, {'direct' if disk.direct else 'through the page cache'}")
    print(f"{'':22}" + "".join(f"{kind:>8}" for kind in KINDS))
    for who in dict.fromkeys(rate.who for rate in disk.rates):
        print(f"{who:22}" + "".join(f"{disk.of(who, kind=kind).median / 1e9:8.2f}" for kind in KINDS))
    print(f"{TIER + ' / best of dd':22}" + "".join(f"{disk.share(kind):8.2f}" for kind in KINDS))


if __name__ == "__main__":
    main()
