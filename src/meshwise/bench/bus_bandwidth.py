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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

COPY = "copy"


def _all(_: int) -> float:
    return 1.0


def _all_but_own(n: int) -> float:
    return (n - 1) / n


BUS_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "reduce_scatter": _all_but_own,
        "all_gather": _all_but_own,
        "all_to_all": _all_but_own,
        "broadcast": _all,
        "reduce": _all,
        "gather": _all_but_own,
        "scatter": _all_but_own,
        "send_recv": _all,
        COPY: _all,
    }
)
"""Bus bandwidth over algorithm bandwidth of each collective in a group of n ranks."""


@dataclass(frozen=True)
class Measurement:
    """One collective at one size in one group. Times are the slowest rank's, in seconds per call.

    `on`: ordinary tensors, tensors of `World.empty` (shared), the tensor of `World.shared_empty` that ranks hold
    together (joint), or ordinary tensors with torch's collectives over gloo (gloo).
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
        return self.algorithm_bandwidth * BUS_FACTORS[self.kind](self.ranks)
