"""Check and time the communication of ranks: one all-reduce, then messages between every pair of ranks.

The received values are compared with the expected values. In round d, rank r sends to rank r + d and receives from
rank r − d, modulo the number of ranks:

    4 ranks, 3 rounds:    0→1 1→2 2→3 3→0    0→2 1→3 2→0 3→1    0→3 1→0 2→1 3→2"""

import statistics
import time
from dataclasses import dataclass

import torch

from meshwise.bench.diagnosis import MachineFinding, note, problem
from meshwise.comm import World

_SMALL_MESSAGES = 20
_LARGE_BYTES = 4 << 20
_SLOW = 4.0
"""A link is slow if the median bandwidth of all links is more than this many times its own bandwidth."""


@dataclass(frozen=True)
class PairLink:
    """Link of two ranks, the smaller first: seconds of a small message (8 bytes), bytes/s of a large one (4 MiB)."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class PairMessages:
    """Results of an exchange between all ranks, equal on every rank. `medium`: such as `shared memory` or `NCCL`."""

    size: int
    device: str
    medium: str
    links: tuple[PairLink, ...]
    findings: tuple[MachineFinding, ...]


def exchange_messages(world: World) -> PairMessages:
    """Exchange messages between all ranks, and return the times and problems of all ranks. Every rank calls it."""
    findings, links = _check_sum(world), []
    for distance in range(1, world.size):
        link, wrong = _exchange(world, distance)
        links.append(link)
        findings += wrong
        world.barrier()
    everyone = world.exchange((links, findings))
    by_pair = {link.ranks: link for own, _ in everyone for link in own}
    pairs = tuple(by_pair[pair] for pair in sorted(by_pair))
    found = dict.fromkeys(finding for _, own in everyone for finding in own)
    return PairMessages(world.size, world.device.type, world.medium, pairs, tuple(found))


def _check_sum(world: World) -> list[MachineFinding]:
    """Sum rank + 1 over all N ranks. Return a problem unless every element is N(N+1)/2, else an empty list."""
    total = torch.full((1000,), world.rank + 1.0, device=world.device)
    world.all_reduce(total, axes=world.mesh.names).wait()
    expected = world.size * (world.size + 1) / 2
    wrong = total[total != expected]
    if not wrong.numel():
        return []
    return [
        problem(
            f"rank {world.rank}: an all-reduce of {world.size} ranks gave {wrong[0].item():g} instead of {expected:g}",
            remedy="test this machine's memory and network card, and try another interface with GLOO_SOCKET_IFNAME",
        )
    ]


def _exchange(world: World, distance: int) -> tuple[PairLink, list[MachineFinding]]:
    """Send to rank r + `distance` and receive from rank r − `distance`: small messages, then large messages."""
    axis = world.mesh.names[0]
    to, source = (world.rank + distance) % world.size, (world.rank - distance) % world.size
    streams = world.streams
    world.prepare(lines=[(rank, (rank + distance) % world.size) for rank in range(world.size)])
    seconds, is_wrong = [], False
    for elements in (*[2] * (_SMALL_MESSAGES + 1), _LARGE_BYTES // 4, _LARGE_BYTES // 4):
        own = torch.full((elements,), float(world.rank), device=world.device)
        received = torch.empty_like(own)
        streams.synchronize()
        start = time.perf_counter()
        for work in (world.send(own, axis=axis, to=to), world.recv(received, axis=axis, source=source)):
            work.wait()
        streams.synchronize()
        seconds.append(time.perf_counter() - start)
        is_wrong = is_wrong or bool((received != source).any())
    pair = (min(source, world.rank), max(source, world.rank))
    link = PairLink(pair, statistics.median(seconds[1 : _SMALL_MESSAGES + 1]), _LARGE_BYTES / seconds[-1])
    if not is_wrong:
        return link, []
    text = f"a message from rank {source} to rank {world.rank} arrived with changed bytes"
    return link, [problem(text, remedy="test the memory and the network cards of the two machines")]


def slow_links(links: tuple[PairLink, ...]) -> list[MachineFinding]:
    """Return a note for each link with less than a quarter of the median bandwidth; none for fewer than three links."""
    if len(links) < 3:
        return []
    median = statistics.median(link.bandwidth for link in links)
    return [
        note(
            f"ranks {link.ranks[0]} and {link.ranks[1]} exchange {link.bandwidth / 1e9:.2f} GB/s, "
            "less than a quarter of the median of all pairs",
            remedy="look at the cable of that link, and for other programs that use the link",
        )
        for link in links
        if link.bandwidth * _SLOW < median
    ]
