"""Find the ranks of a pipeline that do the same work, so that a rehearsal runs only one of them.

Two stages are equal if they run modules of the same classes with parameters of the same shapes, receive and send
equally many values, and share no parameter with another stage. The first and the last stage equal no other stage. Some
plans split hidden states at the first of a list of blocks and gather them after the last. Under these plans the stages
with the first or the last block equal no other stage.
"""

from collections.abc import Hashable

from torch import nn

from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.schedules.action import Schedule

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def rehearsed_ranks(model: nn.Module, *, cut: ModelCut | None, schedule: Schedule, ends: bool) -> tuple[int, ...]:
    """Return, for each rank along pp, the first rank that does the same work. Without a cut all ranks differ.

    `ends`: True if the first and the last of a list of blocks do more work than the others.
    """
    if cut is None:
        return tuple(range(schedule.ranks))
    kinds = [_kind(model, cut, stage, ends=ends) for stage in range(cut.stages)]
    first: dict[Hashable, int] = {}
    return tuple(
        first.setdefault(tuple(kinds[stage] for stage in schedule.stages_of(rank)), rank)
        for rank in range(schedule.ranks)
    )


def _kind(model: nn.Module, cut: ModelCut, stage: int, *, ends: bool) -> Hashable:
    tied = any(stage in stages for stages in cut.ties.values())
    if stage in (0, cut.stages - 1) or tied:
        return stage
    start, stop = cut.bounds[stage : stage + 2]
    return (
        len(cut.sends[stage - 1]),
        len(cut.sends[stage]),
        tuple(_shapes(model.get_submodule(name)) for name in cut.modules[start:stop]),
        tuple(_end(model, name) for name in cut.modules[start:stop]) if ends else (),
    )


def _end(model: nn.Module, name: str) -> Hashable:
    """Return whether a module is the first, and whether it is the last, of its list; () outside of a list."""
    around, _, own = name.rpartition(".")
    names = list(model.get_submodule(around)._modules)
    return (own == names[0], own == names[-1]) if isinstance(model.get_submodule(around), _LISTS) else ()


def _shapes(module: nn.Module) -> Hashable:
    classes = tuple((name, type(one).__qualname__) for name, one in module.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return classes, shapes
