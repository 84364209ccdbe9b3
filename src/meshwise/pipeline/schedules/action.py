"""Represent a pipeline schedule as a table: for each rank, its actions in order.

A schedule written as control flow can only be run. A table can also be checked before it runs, timed, drawn, compared
with another table, and read from a file. One interpreter runs all tables:

    | 0F0 0F1 0B0 0B1        rank 0 holds stage 0: forward of micro-batches 0 and 1, then their backwards
    | 1F0 1B0 1F1 1B1        rank 1 holds stage 1

A function that builds a schedule returns only the computations; `passes` adds sends, receives, gathers and reductions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """Error for a schedule that cannot run, or that excludes the given number of ranks, stages or micro-batches."""


class ActionKind(StrEnum):
    """Kinds of actions. F, B, I and W compute; B does the work of I and W together."""

    F = "F"  # forward
    B = "B"  # backward, whole
    I = "I"  # backward with respect to the stage's input  # noqa: E741 - the name the literature gives it
    W = "W"  # backward with respect to the stage's weights
    SEND_F = "SEND_F"  # the stage's output, to the next stage
    RECV_F = "RECV_F"  # the stage's input, from the stage before
    SEND_B = "SEND_B"  # the gradient of the stage's input, to the stage before
    RECV_B = "RECV_B"  # the gradient of the stage's output, from the next stage
    GATHER = "GATHER"  # gather the stage's sharded parameters (ZeRO-3)
    FREE = "FREE"  # free the gathered parameters
    REDUCE = "REDUCE"  # sum the stage's gradients over the ranks that hold the same stage


COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
"""Kinds that compute."""
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
"""Kinds that send a message to another rank."""
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
"""Kinds that wait for a message from another rank."""
UNITS = frozenset({ActionKind.GATHER, ActionKind.FREE, ActionKind.REDUCE})
"""Kinds for all parameters of a stage; an action of these kinds has no micro-batch."""

_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d*)")


class Action(NamedTuple):
    """One action of a rank for a stage; prints as stage, kind and micro-batch: `2F0`, `2SEND_F0`, `2GATHER`."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`. Raises ScheduleError for any other text."""
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, kind and micro-batch as in 2F0 or 2SEND_F0")
        stage, kind, microbatch = found.groups()
        if (ActionKind(kind) in UNITS) == bool(microbatch):
            form = f"{stage}{kind}" if microbatch else f"{stage}{kind}0"
            raise ScheduleError(f"{text!r} is not an action; {kind} is written as in {form}")
        return cls(int(stage), ActionKind(kind), int(microbatch) if microbatch else None)


@dataclass(frozen=True)
class Schedule:
    """Table with one row of actions per rank along `pp`. Prints one line per row, which `parse` reads."""

    rows: tuple[tuple[Action, ...], ...]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage, by stage. Raises ScheduleError when a stage is on no rank, or on two ranks."""
        ranks: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                owner = ranks.setdefault(action.stage, rank)
                if owner != rank:
                    raise ScheduleError(f"stage {action.stage} is on rank {owner}, but rank {rank} does {action}")
        if missing := sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys()):
            raise ScheduleError(f"no rank does anything for stage {', '.join(map(str, missing))}")
        return tuple(ranks[stage] for stage in range(len(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return 1 + max((a.microbatch for a in self.actions() if a.microbatch is not None), default=-1)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backward is in two parts, I and W."""
        return any(action.kind is ActionKind.I for action in self.actions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def actions(self) -> Iterator[Action]:
        """Yield all actions, rank by rank."""
        return (action for row in self.rows for action in row)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the table in a text with one line per rank. Words of dots, empty lines and `#` comments are ignored.

        Raises ScheduleError, with the line, for a word that is not an action, and for a text without actions."""
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            try:
                row = tuple(Action.parse(word) for word in words if set(word) != {"."})
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
            if words:
                rows.append(row)
        if not rows:
            raise ScheduleError("the table is empty; write one line of actions per rank, as in '0F0 0F1 0B0 0B1'")
        return cls(tuple(rows))
