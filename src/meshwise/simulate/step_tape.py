"""Represent one rank's step as a tape: operations, calls of collectives, and memory, in order.

A tape is cut into segments, each what the rank did for one action of its schedule (`2F0`), or between them
(`exchange`, `update`). Micro-batches after the first are equal, so a few represent all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.stopwatch import Activity
from meshwise.pipeline.schedules.action import Action, ActionKind


class Category(StrEnum):
    """Categories of memory."""

    PARAMETERS = "parameters"  # with masters in a wider type
    GATHERED = "gathered"  # parameters that are whole while they are used (ZeRO-3)
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"  # what a reduction remembers from step to step
    ACTIVATIONS = "activations"  # what a forward keeps for its backward, and what both need on the way
    STAGING = "staging"  # what tensors pass through that rest elsewhere
    COMMUNICATION = "communication"  # what is received, and what is on its way to another rank


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """The largest matrix product of an operation: `batch` products of (m, k) and (k, n)."""

    batch: int
    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class TapeOperation:
    """One kernel, with its sizes."""

    name: str
    dtype: str
    flops: int
    bytes: int
    """Read and written."""
    product: MatrixProduct | None = None
    """For what multiplies matrices."""
    part: float = 1.0
    """Which part of the flops is computed: causal attention leaves out what is masked, which formulas count."""
    again: bool = False
    """Whether it is part of a forward that a backward repeats."""


@dataclass(frozen=True, slots=True)
class TapeCall:
    """Start of a collective, or of one end of a message."""

    record: CallRecord
    ranks: tuple[int, ...]
    """Global ranks of the group; of a message, its source and target."""


@dataclass(frozen=True, slots=True)
class TapeWait:
    """Wait for the end of the call with this number."""

    sequence: int


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Change of memory in bytes."""

    category: Category
    bytes: int
    host: bool = False
    """Whether it lies in the host's memory while the rank computes on a device of its own."""
    fresh: int = 0
    """Times that its pages are requested from the system: by this rank, and by the ranks that map them. 0 for memory
    that changes its category or is freed."""


Entry: TypeAlias = TapeOperation | TapeCall | TapeWait | MemoryChange


@dataclass(frozen=True)
class TapeSegment:
    """Entries of one activity of a rank, in order."""

    activity: Activity
    entries: tuple[Entry, ...]

    @property
    def action(self) -> Action | None:
        """The action of the schedule that the activity is; None for a phase of the step."""
        return self.activity if isinstance(self.activity, Action) else None

    @property
    def kind(self) -> ActionKind | None:
        """The kind of that action."""
        return self.activity.kind if isinstance(self.activity, Action) else None

    @property
    def flops(self) -> int:
        """Flops of all operations."""
        return sum(entry.flops for entry in self.entries if isinstance(entry, TapeOperation))

    def calls(self) -> Iterator[TapeCall]:
        """Yield the collectives, in order."""
        return (entry for entry in self.entries if isinstance(entry, TapeCall))


@dataclass(frozen=True)
class TierTraffic:
    """Bytes of a rank that move between tiers."""

    link: int = 0
    """Over the link of a GPU to its host."""
    disk: int = 0
    """From and to the disk."""


@dataclass(frozen=True)
class Tape:
    """Tape of one rank: while the plan was applied, in the first step, and in a later step."""

    index: int
    """Index of the rank along pp."""
    build: TapeSegment
    first: tuple[TapeSegment, ...]
    steady: tuple[TapeSegment, ...]

    away: Mapping[str, int]
    """Bytes that are kept off the device, by tier: `cpu`, `disk`."""
    microbatch_traffic: TierTraffic = field(default_factory=TierTraffic)
    """Traffic between tiers during the micro-batches of a step."""
    update_traffic: TierTraffic = field(default_factory=TierTraffic)
    """Traffic between tiers at the update."""
    asked: bool = False
    """Whether the model or the loss read values of its batch."""
