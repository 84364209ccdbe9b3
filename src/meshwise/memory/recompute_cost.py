"""Measure what a block's activations take and what recomputing them costs, in the first forwards of a run.

| block    | keeps nothing again | selective       | full            | seconds again: selective, full |
|----------|---------------------|-----------------|-----------------|--------------------------------|
| blocks.0 | all that is saved   | products, input | input           | without the products, all      |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from meshwise.comm.api.streams import StreamEvent, streams_of
from meshwise.plan import PlanError

MODES = ("none", "selective", "full")
"""Modes of recomputation, from the one that keeps most memory to the one that keeps least."""

MIB = 2**20


@dataclass(frozen=True)
class RecomputeCost:
    """Cost of one block, by mode: bytes that a micro-batch keeps, and extra seconds of its backward.

    in_flight   number of micro-batches whose activations the block keeps at most
    """

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    in_flight: float = 1.0

    def kept(self, mode: str) -> int:
        """Return the bytes that all micro-batches in flight keep."""
        return int(self.bytes[mode] * self.in_flight)

    def merged(self, other: "RecomputeCost") -> "RecomputeCost":
        """Return the larger bytes and the shorter, less disturbed time of two measurements."""
        return replace(
            self,
            bytes={mode: max(self.bytes[mode], other.bytes[mode]) for mode in MODES},
            seconds={mode: min(self.seconds[mode], other.seconds[mode]) for mode in MODES},
        )


def choose_modes(costs: Mapping[str, RecomputeCost], *, budget: int, allowed: Sequence[str]) -> dict[str, str]:
    """Return a mode for every block, so that all blocks keep at most `budget` bytes and recompute little.

    At first every block keeps least. Then the block that saves most seconds a byte keeps more, as long as that fits.
    Raises PlanError, with the least budget that works, when nothing fits.
    """
    chosen = {name: min(allowed, key=cost.kept) for name, cost in costs.items()}
    left = budget - sum(cost.kept(chosen[name]) for name, cost in costs.items())
    if left < 0:
        raise PlanError(
            f"budget={budget}: with all {len(costs)} blocks of this rank recomputed they keep {budget - left} bytes. "
            f"Nearest that works: 'budget={-(-(budget - left) // MIB)}M', or more microbatches"
        )
    while True:
        steps = [
            (cost.seconds[chosen[name]] - cost.seconds[mode], cost.kept(mode) - cost.kept(chosen[name]), name, mode)
            for name, cost in costs.items()
            for mode in allowed
        ]
        fitting = [step for step in steps if step[0] > 0 and step[1] <= left]
        if not fitting:
            return chosen
        _, size, name, mode = max(fitting, key=lambda step: step[0] / max(step[1], 1))
        chosen[name] = mode
        left -= size


class DeviceTimer:
    """Seconds of spans on a device, without making it wait before they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._spans: list[tuple[StreamEvent, StreamEvent]] = []
        self._began = self._streams.event(timing=True)

    def __enter__(self) -> "DeviceTimer":
        self._began = self._streams.mark(timing=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._began, self._streams.mark(timing=True)))

    def seconds(self) -> float:
        """Return the sum of all spans."""
        self._streams.synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in self._spans)) / 1000
