"""Compute algorithm and bus bandwidth from the measured time of a collective, as nccl-tests defines them.

Times of different group sizes cannot be compared: a larger group moves more bytes for the same tensor. Two bandwidths
make measurements comparable:

    | algorithm bandwidth   bytes / seconds
    | bus bandwidth         algorithm bandwidth × a factor of the group size n. With this factor, a perfect algorithm
    |                       has the bandwidth of the slowest link for every n

    | collective            bytes                                     factor
    | all_reduce            of the tensor                            2(n−1)/n
    | reduce_scatter        of the full input                         (n−1)/n
    | all_gather            of the full output                        (n−1)/n
    | all_to_all            of one rank's full input                  (n−1)/n
    | gather, scatter       of the full tensor on the root            (n−1)/n
    | broadcast, reduce     of the tensor                                   1
    | send_recv             of one rank's message                           1

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. `copy` is no collective: all ranks copy
a tensor within their own memory at the same time. Ranks of one machine cannot exchange data faster than they copy it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

COPY = "copy"
"""Name of the measurement in which every rank copies a tensor within its own memory."""


def _factor_one(_: int) -> float:
    return 1.0


def _all_but_own(n: int) -> float:
    return (n - 1) / n


BUS_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "reduce_scatter": _all_but_own,
        "all_gather": _all_but_own,
        "all_to_all": _all_but_own,
        "broadcast": _factor_one,
        "reduce": _factor_one,
        "gather": _all_but_own,
        "scatter": _all_but_own,
        "send_recv": _factor_one,
        COPY: _factor_one,
    }
)
"""For each collective, a function from the group size n to the factor: bus bandwidth / algorithm bandwidth."""


@dataclass(frozen=True)
class Measurement:
    """Measured times of one collective, at one size of the full tensor, in one group of ranks.

    | kind      name of the collective, a key of `BUS_FACTORS`
    | seconds   of one call on the slowest rank: the median and the minimum over all rounds
    | on        `ordinary` tensors; `shared` tensors of `World.empty`; one `joint` tensor of `World.shared_empty` for
    |           all ranks; or `gloo`, torch's collectives over gloo on ordinary tensors"""

    kind: str
    ranks: int
    bytes: int
    median_seconds: float
    min_seconds: float
    on: str = "ordinary"

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the full tensor per second of the median call."""
        return self.bytes / self.median_seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that the slowest link would carry under a perfect algorithm, from the median call."""
        return self.algorithm_bandwidth * BUS_FACTORS[self.kind](self.ranks)
