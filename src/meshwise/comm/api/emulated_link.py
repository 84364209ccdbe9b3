"""A slow network between ranks that share a host (`EmulatedLink`): each wait ends no earlier than on that network.

Each rank has one link with a bandwidth and a delay. Transfers of a rank take the link one after another, and a rank may
compute meanwhile. Ring algorithms give the bytes, a binary tree gives the delays, on n ranks:

    | all_reduce                              2 (n - 1) / n of its bytes      2 log2(n) delays
    | all_gather, reduce_scatter, all_to_all  (n - 1) / n                     log2(n)
    | gather, scatter                         n - 1                           log2(n)
    | send, recv                              1                               1
    | broadcast, reduce, barrier              1                               log2(n)

A transfer begins when this rank posts it. If the wait for other ranks takes longer than a tenth of the transfer and
2 ms, the transfer begins at the end of this wait. The data itself moves as always, so a network that is slower than the
emulated one stays slower."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwise.comm.api.flight_recorder import CallRecord

_BITS: Mapping[str, float] = {"k": 1e3, "M": 1e6, "G": 1e9}
_SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"(\d+(?:\.\d+)?)([kMG])bit +(\d+(?:\.\d+)?)(us|ms|s)((?: +[a-z]\w*)*)")


@dataclass
class EmulatedLink:
    """Link of one rank to the others, for calls along some axes. `bandwidth` in bytes per second, `delay` in seconds.

    | text    as `parse` read it
    | axes    only calls along one of these axes of the mesh are slow; empty: all calls"""

    text: str
    bandwidth: float
    delay: float
    axes: frozenset[str] = frozenset()
    _free: float = field(default=0.0, init=False)

    @classmethod
    def parse(cls, text: str) -> "EmulatedLink":
        """Return the link of `1Gbit 2ms`, or `1Gbit 2ms dp` for calls along dp alone. Raises ValueError."""
        found = _LINK.fullmatch(text.strip())
        if found is None or not float(found[1]):
            raise ValueError(
                f"emulate={text!r} is no bandwidth with a delay; write '1Gbit 2ms', or '100Mbit 20ms dp' for calls "
                "along dp alone"
            )
        bandwidth, delay = float(found[1]) * _BITS[found[2]] / 8, float(found[3]) * _SECONDS[found[4]]
        return cls(text, bandwidth, delay, frozenset(found[5].split()))

    def seconds(self, record: CallRecord, *, ranks: int) -> tuple[float, float]:
        """Return the seconds that a call on so many ranks takes the link, and the seconds of its delays."""
        if self.axes and not self.axes.intersection(record.axes):
            return 0.0, 0.0
        hops = math.log2(ranks)
        if record.point_to_point:
            share, hops = 1.0, 1.0
        elif record.kind == "all_reduce":
            share, hops = 2 * (ranks - 1) / ranks, 2 * hops
        elif record.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            share = (ranks - 1) / ranks
        else:
            share = ranks - 1.0 if record.kind in ("gather", "scatter") else 1.0
        return share * record.bytes / self.bandwidth, hops * self.delay

    def call(self, finish: Callable[[], None], *, record: CallRecord, ranks: int, posted: float) -> None:
        """Run `finish`, which waits for the other ranks, then sleep until the call would be done on the link.

        posted: time of the call in seconds of `time.monotonic`."""
        began = time.monotonic()
        finish()
        ended = time.monotonic()
        transfer, delays = self.seconds(record, ranks=ranks)
        blocked = ended - began > max(2e-3, (transfer + delays) / 10)
        self._free = max(ended if blocked else posted, self._free) + transfer
        time.sleep(max(0.0, self._free + delays - time.monotonic()))
