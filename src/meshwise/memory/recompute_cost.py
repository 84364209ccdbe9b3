"""Describe the measured cost of recomputing a block in each mode, and choose the modes that fit a memory budget.

| mode        | bytes that a block keeps             | extra seconds of its backward (measured by `recompute.py`) |
|-------------|--------------------------------------|------------------------------------------------------------|
| `none`      | all tensors that autograd saves      | none                                                       |
| `selective` | its input and its matrix products    | its forward without these products                         |
| `full`      | its input                            | its forward                                                |"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from meshwise.comm.api.streams import StreamEvent, streams_of
from meshwise.plan import PlanError

MODES = ("none", "selective", "full")
"""Modes of recomputation, from the one that keeps most memory to the one that keeps least."""

MIB = 2**20
"""Bytes of a mebibyte."""


@dataclass(frozen=True)
class RecomputeCost:
    """Cost of one block by mode: bytes that it keeps and seconds of its recomputation, for one micro-batch.

    `in_flight`: largest number of micro-batches whose activations the block keeps at one time."""

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    in_flight: float = 1.0

    def kept(self, mode: str) -> int:
        """Return the bytes that the block keeps under `mode` for all micro-batches in flight."""
        return int(self.bytes[mode] * self.in_flight)

    def merged(self, other: "RecomputeCost") -> "RecomputeCost":
        """Return two measurements as one: for each mode the larger bytes and the shorter time."""
        return replace(
            self,
            bytes={mode: max(self.bytes[mode], other.bytes[mode]) for mode in MODES},
            seconds={mode: min(self.seconds[mode], other.seconds[mode]) for mode in MODES},
        )


def choose_modes(costs: Mapping[str, RecomputeCost], *, budget: int, allowed: Sequence[str]) -> dict[str, str]:
    """Return a mode of `allowed` for every block; all blocks keep at most `budget` bytes, and recompute little.

    At first every block has the mode that keeps the fewest bytes. Then blocks change to modes that keep more, as long
    as the bytes fit; the block that saves the most seconds per byte comes first. Raises PlanError, with the smallest
    budget that works, if nothing fits."""
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
    """Timer of `with` blocks on a device. It sums their seconds; only `seconds` waits for the device."""

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
        """Wait for the device, and return the seconds of all `with` blocks in total."""
        self._streams.synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in self._spans)) / 1000
