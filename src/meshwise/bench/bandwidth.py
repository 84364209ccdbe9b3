"""Bandwidths of collectives from their times, by the definitions of nccl-tests.

Time alone says little: a larger group moves more bytes for the same tensor. Two bandwidths make figures comparable.

    | algorithm bandwidth   bytes / seconds, what the caller sees
    | bus bandwidth         algorithm bandwidth × a factor of the group size n, chosen so that a perfect algorithm gives
    |                       the speed of the slowest link, whatever n is

    | all_reduce            bytes of the tensor                      2(n−1)/n
    | reduce_scatter        bytes of the whole side                   (n−1)/n
    | all_gather            bytes of the gathered side                (n−1)/n
    | all_to_all            bytes of one rank's whole side            (n−1)/n
    | gather, scatter       bytes of the whole side, on the root      (n−1)/n
    | broadcast, reduce     bytes of the tensor                             1
    | send_recv             bytes of one rank's message                     1

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. `copy` is not a collective: every rank
copies the tensor in its own memory at the same time. That is the upper limit for ranks of one machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BusFactor:
    """The factor (per_rank · n + fixed) / n."""

    per_rank: int
    fixed: int

    def of(self, n: int) -> float:
        """Bus bandwidth over algorithm bandwidth in a group of n ranks."""
        return (self.per_rank * n + self.fixed) / n


_EVERYTHING = BusFactor(1, 0)
_ALL_BUT_OWN = BusFactor(1, -1)
_TWICE_ALL_BUT_OWN = BusFactor(2, -2)

COPY = "copy"

BUS_FACTORS: Mapping[str, BusFactor] = MappingProxyType(
    {
        "all_reduce": _TWICE_ALL_BUT_OWN,
        "reduce_scatter": _ALL_BUT_OWN,
        "all_gather": _ALL_BUT_OWN,
        "all_to_all": _ALL_BUT_OWN,
        "broadcast": _EVERYTHING,
        "reduce": _EVERYTHING,
        "gather": _ALL_BUT_OWN,
        "scatter": _ALL_BUT_OWN,
        "send_recv": _EVERYTHING,
        COPY: _EVERYTHING,
    }
)


@dataclass(frozen=True)
class Measurement:
    """One collective at one size in one group. Times are the slowest rank's, in seconds per call.

    `on`: ordinary tensors, tensors of `World.empty` (shared), the tensor of `World.shared_empty` that ranks hold
    together (common), or ordinary tensors with torch's collectives over gloo (gloo).
    """

    kind: str
    ranks: int
    bytes: int
    median_seconds: float
    min_seconds: float
    on: str = "ordinary"

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second as the caller sees it, of the median call."""
        return self.bytes / self.median_seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second over the slowest link, if the algorithm were perfect."""
        return self.algorithm_bandwidth * BUS_FACTORS[self.kind].of(self.ranks)


def copy_bandwidth(measured: Mapping[tuple[str, int, int], Measurement], *, like: Measurement) -> float:
    """Return the bandwidth in bytes per second of a plain copy with as many bytes and ranks, measured in the same
    run.
    """
    return measured[COPY, like.ranks, like.bytes].bus_bandwidth
