"""Build the classic schedules, in which a backward is one action: naive, GPipe, 1F1B, interleaved and looped.

Every rank first runs some forwards, then one forward and one backward in turn, then the remaining backwards. The
schedules differ in the number of first forwards, and in the order in which a rank runs its stages. docs/pipeline.md has
their bubbles and memory. p is the number of ranks, v the number of stages per rank."""

from collections.abc import Sequence

from meshwise.pipeline.schedules.action import Action, ActionKind, Schedule


def naive(pp: int, *, microbatches: int) -> Schedule:
    """Return the schedule without overlap: one micro-batch at a time runs through all stages and back."""
    return Schedule(
        tuple(
            tuple(Action(rank, kind, index) for index in range(microbatches) for kind in (ActionKind.F, ActionKind.B))
            for rank in range(pp)
        )
    )


def gpipe(pp: int, *, microbatches: int) -> Schedule:
    """Return the GPipe schedule (Huang et al., 2019): all forwards, then all backwards."""
    return looped(pp, microbatches=microbatches, virtual_stages=1)


def one_forward_one_backward(pp: int, *, microbatches: int) -> Schedule:
    """Return the 1F1B schedule: rank r first runs p - r - 1 forwards, then alternates (Narayanan et al., 2019)."""
    order = [(0, index) for index in range(microbatches)]
    return _alternating(pp, order, laps=1, ahead=[pp - rank - 1 for rank in range(pp)])


def interleaved(pp: int, *, microbatches: int, virtual_stages: int) -> Schedule:
    """Return interleaved 1F1B: stage s is on rank s mod p. Groups of p micro-batches pass through all ranks v times.

    `microbatches` has to be a multiple of `pp` (Narayanan et al., 2021)."""
    order = [
        (lap, start + index)
        for start in range(0, microbatches, pp)
        for lap in range(virtual_stages)
        for index in range(pp)
    ]
    ahead = [2 * (pp - rank - 1) + (virtual_stages - 1) * pp for rank in range(pp)]
    return _alternating(pp, order, laps=virtual_stages, ahead=ahead)


def looped(pp: int, *, microbatches: int, virtual_stages: int) -> Schedule:
    """Return the breadth-first schedule (Lamy-Poirier, 2023): a rank runs all forwards of a stage in a row."""
    order = [(lap, index) for lap in range(virtual_stages) for index in range(microbatches)]
    return _alternating(pp, order, laps=virtual_stages, ahead=[len(order)] * pp)


def _alternating(pp: int, order: Sequence[tuple[int, int]], *, laps: int, ahead: Sequence[int]) -> Schedule:
    """Return the table in which rank r runs `ahead[r]` forwards before it alternates with backwards.

    `order`: a rank's forwards, as (lap, micro-batch): lap l runs stage l·p + rank. Backwards reverse the laps."""
    rows = []
    for rank, first in enumerate(min(each, len(order)) for each in ahead):
        forwards = [Action(lap * pp + rank, ActionKind.F, index) for lap, index in order]
        backwards = [Action((laps - 1 - lap) * pp + rank, ActionKind.B, index) for lap, index in order]
        turns = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
        rows.append((*forwards[:first], *turns, *backwards[len(forwards) - first :]))
    return Schedule(tuple(rows))
