"""Check whether the ranks can communicate: all ranks add up numbers, every rank sends to every other, and the results
are compared with what they must be.

In round d each rank sends to the rank d further on and receives from the rank d before it:

    4 ranks, 3 rounds:    0→1 1→2 2→3 3→0    0→2 1→3 2→0 3→1    0→3 1→0 2→1 3→2
"""

import statistics
import time
from dataclasses import dataclass

import torch

from meshwise.bench.diagnosis import MachineFinding, note, problem
from meshwise.comm import World
from meshwise.comm.api.streams import streams_of

_SMALL_MESSAGES = 20
_LARGE_BYTES = 4 << 20
_SLOW = 4.0
"""A link is slow if the median link has more than so many times its bandwidth."""


@dataclass(frozen=True)
class PairLink:
    """The messages of one pair of ranks: seconds for a small one, and bytes per second of a large one."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class PairMessages:
    """Results of an exchange between all ranks, equal on every rank."""

    size: int
    device: str
    medium: str
    links: tuple[PairLink, ...]
    findings: tuple[MachineFinding, ...]


def exchange_messages(world: World) -> PairMessages:
    """Exchange messages between all ranks and return what was measured and found. Every rank calls it."""
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
    """Return a problem if an all-reduce of rank + 1 does not give N(N+1)/2 in every element."""
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
    """Send to the rank `distance` further on and receive from the one before: small messages, and then a large one."""
    axis = world.mesh.names[0]
    to, source = (world.rank + distance) % world.size, (world.rank - distance) % world.size
    streams = streams_of(world.device)
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
    text = f"a message from rank {source} to rank {world.rank} did not arrive as it was sent"
    return link, [problem(text, remedy="test the memory and the network cards of the two machines")]


def slow_links(links: tuple[PairLink, ...]) -> list[MachineFinding]:
    """Return a note for each of three links or more that has less than a quarter of the median bandwidth."""
    if len(links) < 3:
        return []
    median = statistics.median(link.bandwidth for link in links)
    return [
        note(
            f"ranks {link.ranks[0]} and {link.ranks[1]} exchange {link.bandwidth / 1e9:.2f} GB/s, "
            "less than a quarter of what the others do",
            remedy="look at that link, its cable, and what else uses it",
        )
        for link in links
        if link.bandwidth * _SLOW < median
    ]
