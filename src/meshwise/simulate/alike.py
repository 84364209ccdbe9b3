"""Which ranks of a pipeline do the same, so that one of them is rehearsed for all.

Two stages are alike when they run modules of the same classes with parameters of the same shapes, receive and send as
many values, and hold nothing that another stage holds too. The first and the last stage are like no other.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from meshwise.pipeline.action import Schedule
from meshwise.pipeline.cut import Cut


def alike(model: nn.Module, *, cut: Cut | None, schedule: Schedule) -> tuple[int, ...]:
    """For each rank along pp, the first one that is like it. Without a cut between modules, every rank is its own."""
    if cut is None or cut.trace is not None:
        return tuple(range(schedule.ranks))
    kinds = [_kind(model, cut, stage) for stage in range(cut.stages)]
    first: dict[Hashable, int] = {}
    return tuple(
        first.setdefault(tuple(kinds[stage] for stage in schedule.stages_of(rank)), rank)
        for rank in range(schedule.ranks)
    )


def _kind(model: nn.Module, cut: Cut, stage: int) -> Hashable:
    tied = any(stage in stages for stages in cut.ties.values())
    if stage in (0, cut.stages - 1) or tied:
        return stage
    start, stop = cut.bounds[stage : stage + 2]
    return (
        len(cut.crossing[stage - 1]),
        len(cut.crossing[stage]),
        tuple(_shapes(model.get_submodule(name)) for name in cut.modules[start:stop]),
    )


def _shapes(module: nn.Module) -> Hashable:
    classes = tuple((name, type(one).__qualname__) for name, one in module.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return classes, shapes
