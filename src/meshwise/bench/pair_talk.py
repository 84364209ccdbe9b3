"""Check whether the ranks can communicate: every pair exchanges messages, all ranks add up numbers, and the results are
checked.

Pairs meet as in a tournament, so that in each round every rank has one partner (one rank rests when they are odd):

    4 ranks, 3 rounds:    0-3 1-2    3-2 0-1    1-3 2-0

which makes N-1 short rounds rather than N(N-1)/2, and no link is measured while another pair uses the same rank.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.bench.finding import MachineFinding, problem
from meshwise.comm import World
from meshwise.comm.api.streams import streams_of

_PINGS = 20
_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class PairLink:
    """Two ranks: seconds for a small message one way, and bytes per second of a large one."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class PairTalks:
    """Results of an exchange between all ranks, the same on every rank."""

    size: int
    device: str
    medium: str
    links: tuple[PairLink, ...]
    findings: tuple[MachineFinding, ...]


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return every pair of `size` ranks once, in rounds in which no rank has two partners (the circle method)."""
    circle = [*range(size), *([-1] if size % 2 else [])]
    plan = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        plan.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return plan


def talk(world: World) -> PairTalks:
    """Return every rank calls it. Takes milliseconds per rank."""
    findings = [*_add_up(world)]
    links = []
    for pairs in rounds(world.size):
        mine = [pair for pair in pairs if world.rank in pair]
        for pair in mine:
            link, wrong = _exchange(world, pair)
            links.append(link)
            findings += wrong
        world.barrier()
    everyone = world.exchange((links, findings))
    by_pair = {link.ranks: link for heard, _ in everyone for link in heard}
    told = {finding: None for _, found in everyone for finding in found}
    return PairTalks(
        world.size, world.device.type, world.medium, tuple(by_pair[pair] for pair in sorted(by_pair)), tuple(told)
    )


def _add_up(world: World) -> list[MachineFinding]:
    """Return an all-reduce of rank + 1 has to give N(N+1)/2 in every element."""
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


def _exchange(world: World, pair: tuple[int, int]) -> tuple[PairLink, list[MachineFinding]]:
    """Ping-pong between two ranks, the lower one first, with small messages and then a large one."""
    peer = pair[1] if world.rank == pair[0] else pair[0]
    seconds, wrong = [], False
    for elements in (*[2] * (_PINGS + 1), _LARGE_BYTES // 4, _LARGE_BYTES // 4):
        own = torch.full((elements,), float(world.rank), device=world.device)
        other = torch.empty_like(own)
        seconds.append(_ping_pong(world, own, other, peer))
        wrong = wrong or bool((other != peer).any())
    link = PairLink(pair, statistics.median(seconds[1 : _PINGS + 1]), _LARGE_BYTES / seconds[-1])
    if not wrong:
        return link, []
    text = f"a message from rank {peer} to rank {world.rank} did not arrive as it was sent"
    return link, [problem(text, remedy="test the memory and the network cards of the two machines")]


def _ping_pong(world: World, own: Tensor, other: Tensor, peer: int) -> float:
    """Return seconds for one way: the lower rank sends and then receives, the higher one the reverse."""
    axis = world.mesh.names[0]
    start = _now(world.device)
    for sending in (world.rank < peer, world.rank > peer):
        if sending:
            world.send(own, axis=axis, to=peer).wait()
        else:
            world.recv(other, axis=axis, source=peer).wait()
    return (_now(world.device) - start) / 2


def _now(device: torch.device) -> float:
    streams_of(device).synchronize()
    return time.perf_counter()


def slow_links(links: Sequence[PairLink], *, factor: float = 4.0) -> list[PairLink]:
    """Links whose bandwidth is below the median's by more than the factor."""
    if len(links) < 3:
        return []
    median = statistics.median(link.bandwidth for link in links)
    return [link for link in links if link.bandwidth * factor < median]
