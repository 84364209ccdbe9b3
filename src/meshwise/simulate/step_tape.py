"""Define the tape of a rank: the recorded operations, collective calls and memory changes of its steps, in order.

A tape consists of segments. A segment has the entries of one action of the schedule (`2F0`: stage 2, forward,
micro-batch 0), or of one phase outside of actions (`exchange`, `update`). Micro-batches after the first one are equal,
so a tape has only a few of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from meshwise.comm.api.flight_recorder import Activity, CallRecord
from meshwise.pipeline.schedules.action import Action, ActionKind


class Category(StrEnum):
    """Category of memory: the purpose of a tensor."""

    PARAMETERS = "parameters"  # including masters
    GATHERED = "gathered"  # full parameters while they are used (ZeRO-3)
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"  # state of a reduction from step to step
    ACTIVATIONS = "activations"  # tensors kept for the backward, and temporary tensors
    STAGING = "staging"  # buffers for tensors on their way to another tier
    COMMUNICATION = "communication"  # received tensors, and tensors being sent


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """Sizes of an operation's largest matrix product: `batch` products of an (m, k) and a (k, n) matrix."""

    batch: int
    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class TapeOperation:
    """One operation that a rank ran, with its flops and bytes."""

    name: str
    """Name of the operation in `aten`, such as `mm`."""
    dtype: str
    """Dtype of its first tensor, such as `bfloat16`; "" without a tensor."""
    flops: int
    bytes: int
    """Bytes that it reads and writes."""
    product: MatrixProduct | None = None
    """Sizes of its matrix product; None if it multiplies no matrices."""
    part: float = 1.0
    """Fraction of `flops` that is computed; below 1 for causal attention, whose formula also counts masked scores."""
    again: bool = False
    """True if it belongs to a forward that a backward repeats (recomputation)."""


@dataclass(frozen=True, slots=True)
class TapeCall:
    """Start of a collective, or of the send or the receive of a message."""

    record: CallRecord
    ranks: tuple[int, ...]
    """Global ranks of the group; for a message, its source and its target."""


@dataclass(frozen=True, slots=True)
class TapeWait:
    """Wait for the end of the call whose record has the number `sequence`."""

    sequence: int


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Allocation (positive) or release (negative) of `bytes` bytes of a category."""

    category: Category
    bytes: int
    host: bool = False
    """True for memory of the host, if the rank computes on a device with its own memory."""
    fresh: int = 0
    """Number of times that the system provides its pages: one more than usual for shared memory, whose pages are new to
    the other ranks too. 0 for freed memory, and for memory that changes its category."""


Entry: TypeAlias = TapeOperation | TapeCall | TapeWait | MemoryChange
"""Entry of a tape."""


@dataclass(frozen=True)
class TapeSegment:
    """Entries of one activity of a rank (an action of the schedule or a phase of the step), in order."""

    activity: Activity
    entries: tuple[Entry, ...]

    @property
    def action(self) -> Action | None:
        """The segment's action of the schedule; None for a phase of the step."""
        return self.activity if isinstance(self.activity, Action) else None

    @property
    def kind(self) -> ActionKind | None:
        """The kind of the segment's action; None for a phase of the step."""
        return self.activity.kind if isinstance(self.activity, Action) else None

    @property
    def flops(self) -> int:
        """Flops of all operations of the segment."""
        return sum(entry.flops for entry in self.entries if isinstance(entry, TapeOperation))

    def calls(self) -> Iterator[TapeCall]:
        """Yield the collectives and messages that the segment starts, in order."""
        return (entry for entry in self.entries if isinstance(entry, TapeCall))


@dataclass(frozen=True)
class TierTraffic:
    """Bytes of a rank that move between tiers in a step."""

    link: int = 0
    """Bytes over the link between a GPU and its host."""
    disk: int = 0
    """Bytes read from and written to the disk."""


@dataclass(frozen=True)
class Tape:
    """Tape of one rank: its memory before the first step, the first step, and a later step."""

    index: int
    """Index of the rank along pp."""
    build: TapeSegment
    """Memory that exists after `parallelize`, before the first step."""
    first: tuple[TapeSegment, ...]
    """First step, with one micro-batch; this step allocates the optimizer's state."""
    steady: tuple[TapeSegment, ...]
    """Second step, with the micro-batches that stand for all."""
    away: Mapping[str, int]
    """Bytes of the rank's state off the device, by tier: `cpu`, `disk`."""
    microbatch_traffic: TierTraffic = field(default_factory=TierTraffic)
    """Traffic between tiers during the micro-batches of a step."""
    update_traffic: TierTraffic = field(default_factory=TierTraffic)
    """Traffic between tiers at the update."""
