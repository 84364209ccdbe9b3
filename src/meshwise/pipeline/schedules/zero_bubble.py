"""Build zero-bubble schedules with split backwards: I runs at once, as the stage before waits for it, and W later.

docs/pipeline.md has their bubbles and memory. zb-h1 and zb-h2 (Qi et al., 2023) follow one rule, with f = i = w = 1. In
each unit of time, a rank runs the next forward if the limits allow it, else the next I, else a W. The two differ only
in their two limits. zb-v (Qi et al., 2024) and dualpipev (DeepSeek, 2025) put stages r and 2p - 1 - r on rank r (a V).
So the loss is on rank 0. There this rule would leave gaps of a few units, so they are written as phases of repeated
actions.

DualPipeV's published formula for the bubble, (p - 1) (f + 2i - w), assumes that a forward and a backward run together.
Here they run in turn, so the next rank has one result earlier."""

from collections.abc import Sequence

from meshwise.pipeline.schedules.action import Action, ActionKind, Schedule


def zb_h1(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: the memory of 1F1B with a third of its bubble."""
    return _greedy(microbatches, ahead=[pp - rank for rank in range(pp)], most=pp)


def zb_h2(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-H2 schedule: no bubble between a rank's first and last action, for about twice the memory."""
    return _greedy(microbatches, ahead=[2 * (pp - rank) - 1 for rank in range(pp)], most=2 * pp - 1)


def _greedy(microbatches: int, *, ahead: Sequence[int], most: int) -> Schedule:
    """Return the schedule in which every rank runs, in each unit of time, the first allowed action of F, I and W.

    A rank has at most `most` micro-batches between F and W; its forwards are at most `ahead[rank]` ahead of its I."""
    ranks = range(len(ahead))
    rows: list[list[Action]] = [[] for _ in ranks]
    done = [dict.fromkeys((ActionKind.F, ActionKind.I, ActionKind.W), 0) for _ in ranks]
    while any(rank[ActionKind.W] < microbatches for rank in done):
        before = [dict(rank) for rank in done]
        for rank in ranks:
            f, i, w = done[rank].values()
            received = before[rank - 1][ActionKind.F] if rank > 0 else microbatches
            returned = before[rank + 1][ActionKind.I] if rank + 1 < len(ahead) else microbatches
            if f < received and f - w < most and f - i < ahead[rank]:
                kind = ActionKind.F
            elif i < min(f, returned):
                kind = ActionKind.I
            elif w < i:
                kind = ActionKind.W
            else:
                continue
            rows[rank].append(Action(rank, kind, done[rank][kind]))
            done[rank][kind] += 1
    return Schedule(tuple(map(tuple, rows)))


def zb_v(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-V schedule for at least 2p micro-batches: the memory of 1F1B, no bubble if F, I and W are equal."""
    return Schedule(tuple(_zb_v_row(rank, pp, microbatches) for rank in range(pp)))


def _zb_v_row(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    row = _Row(rank, 2 * pp - 1 - rank)
    row.add("F0", times=2 * (pp - rank) - 1)
    row.add("F1 F0", times=rank)
    row.add("F1 I1 W1", times=pp - rank)
    row.add("F0 I0 W0 F1 I1 W1", times=microbatches - 2 * pp + rank + 1)
    row.add("I0 W0 F1 I1 W1", times=pp - rank - 1)
    row.add("I0 I1", times=rank)
    row.add("I0 W0", times=pp - rank)
    row.add("W1", times=rank)
    row.add("W0", times=rank)
    return tuple(row.actions)


def dualpipev(pp: int, *, microbatches: int) -> Schedule:
    """Return DualPipeV, half of a DualPipe, for at least 2p micro-batches; the phases follow DeepSeek's `dualpipev.py`.

    It alternates forwards and backwards in pairs, so that their communication could overlap."""
    return Schedule(tuple(_dualpipev_row(rank, pp, microbatches) for rank in range(pp)))


def _dualpipev_row(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    row = _Row(rank, 2 * pp - 1 - rank)
    after = pp - rank - 1
    row.add("F0", times=2 * after)
    row.add("F0 F1", times=rank + 1)
    row.add("I1 W1 F1", times=after)
    row.add("F0 B1 F1 B0", times=microbatches - 2 * pp + rank + 1)
    row.add("B1 F1 B0", times=after)
    row.add("B1 B0", times=(rank + 1) // 2)
    row.add("B1 I0" if rank % 2 == 0 else "I1 I0", times=1)
    row.add("I1 I0", times=(rank + 1) // 2 - rank % 2)
    row.add("W I0", times=after)
    row.add("W", times=rank + 1)
    return tuple(row.actions)


class _Row:
    """Row in the making. Words of `add`: `F1` is the next forward of the rank's second stage, `W` its oldest W."""

    def __init__(self, *stages: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: dict[tuple[int, ActionKind], int] = {}
        self._left: list[Action] = []

    def add(self, words: str, *, times: int) -> None:
        """Append the actions of these words, repeated `times` times."""
        for word in words.split() * times:
            kind, stage = ActionKind(word[0]), self._stages[int(word[1:] or 0)]
            if kind is ActionKind.W:
                weight = next(action for action in self._left if word == "W" or action.stage == stage)
                self._left.remove(weight)
                self.actions.append(weight)
                continue
            counted = (stage, ActionKind.F if kind is ActionKind.F else ActionKind.B)
            index = self._next.get(counted, 0)
            self._next[counted] = index + 1
            self.actions.append(Action(stage, kind, index))
            if kind is ActionKind.I:
                self._left.append(Action(stage, ActionKind.W, index))
