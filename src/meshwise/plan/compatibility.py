"""The table of plans that are refused: combinations of keys, each with the reason and the nearest plan that works."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq, ge, gt, ne
from typing import Any

from meshwise.plan.plan_keys import keys_of


@dataclass(frozen=True)
class Refusal:
    """A row of the compatibility table, in the notation of plans.

    | when      conditions: a plan that meets all of them is refused, as in `pp>1 zero>=2` or `offload.params!=device`
    | reason    why such a plan cannot work
    | instead   the change that leads to the nearest plan that works, such as `tp_mode=1d`"""

    when: str
    reason: str
    instead: str

    def applies(self, plan: Any) -> bool:
        """Return whether `plan` meets every condition. A degree of None (`auto`) meets no condition."""
        keys = keys_of(plan.__class__)
        for key, part, holds, bound in _conditions(self.when):
            value = getattr(plan, key)
            value = keys[key].part(value, name=part) if part else value
            if value is None or not holds(value, bound if keys[key].words else int(bound)):
                return False
        return True

    def changes(self, plan: Any) -> dict[str, int | str]:
        """Return the key that `instead` changes, with its new value."""
        key, value = self.instead.split("=")
        return {key: value if keys_of(plan.__class__)[key].words else int(value)}


@cache
def _conditions(when: str) -> Sequence[tuple[str, str, Callable[[Any, Any], bool], str]]:
    """Return each condition as (key, part of its value, comparison, bound)."""
    comparisons: Mapping[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "=": eq, "!=": ne}
    found = []
    for condition in when.split():
        key, sign, bound = re.split(r"(>=|!=|>|=)", condition)
        key, _, part = key.partition(".")
        found.append((key, part, comparisons[sign], bound))
    return tuple(found)


COMPATIBILITY = (
    Refusal(
        when="tp_mode!=1d sequence_parallel>0",
        reason="2d, 2.5d and 3d split every activation already",
        instead="sequence_parallel=0",
    ),
    Refusal(when="tp_mode!=2.5d tp_depth>1", reason="only 2.5d has a depth", instead="tp_depth=1"),
    Refusal(when="pp=1 schedule!=1f1b", reason="only a pipeline has a schedule", instead="schedule=1f1b"),
    Refusal(when="pp=1 virtual_stages>1", reason="only a pipeline has stages", instead="virtual_stages=1"),
    Refusal(
        when="zero!=3 offload.params!=device",
        reason="only zero=3 gathers parameters for their use and stores them elsewhere after it",
        instead="zero=3",
    ),
    Refusal(when="zero=0 shards>0", reason="only zero shards state", instead="zero=1"),
    Refusal(when="shards>0 ep>1", reason="experts and shards would both divide the ranks of dp", instead="shards=0"),
    Refusal(
        when="shards>0 wire.codec!=none",
        reason="a codec sums over all ranks of dp at once, not over groups and then between them",
        instead="shards=0",
    ),
    Refusal(
        when="precision=fp16 wire.codec!=none",
        reason="the error that a codec keeps has the loss scale of an earlier step",
        instead="precision=bf16",
    ),
    Refusal(when="cp=1 context!=auto", reason="only cp splits tokens", instead="context=auto"),
    Refusal(when="context!=usp cp_heads>1", reason="only usp has two kinds of cp ranks", instead="cp_heads=1"),
    Refusal(
        when="cp>1 tp_mode!=1d", reason="2d, 2.5d and 3d split rows, and cp has 1d matrices only", instead="tp_mode=1d"
    ),
    Refusal(
        when="tp_mode!=1d ep>1",
        reason="the grids of 2d, 2.5d and 3d split the hidden states that experts need whole",
        instead="ep=1",
    ),
    Refusal(when="tp_mode!=1d etp>1", reason="only 1d splits the matrices of experts", instead="etp=1"),
    Refusal(
        when="compile=blocks tp>1",
        reason="a block split by tp calls collectives that torch.compile cannot trace",
        instead="compile=off",
    ),
    Refusal(
        when="compile=blocks recompute=selective",
        reason="selective recomputation keeps the outputs of single operations, which a compiled block does not show",
        instead="recompute=full",
    ),
    Refusal(
        when="compile=blocks budget>0",
        reason="a budget times single operations, which a compiled block does not show",
        instead="budget=0",
    ),
    Refusal(
        when="compile=blocks cp>1",
        reason="the attention over split tokens calls collectives that torch.compile cannot trace",
        instead="compile=off",
    ),
    Refusal(
        when="compile=blocks ep>1",
        reason="a mixture exchanges tokens by collectives that torch.compile cannot trace",
        instead="compile=off",
    ),
    Refusal(when="sync=step every>1", reason="sync=step agrees in each step", instead="every=1"),
    Refusal(
        when="sync!=step zero>0",
        reason="replicas that differ between agreements cannot share their state",
        instead="zero=0",
    ),
    Refusal(
        when="sync!=step ep>1", reason="experts that are divided over replicas are used in each step", instead="ep=1"
    ),
    Refusal(
        when="sync!=step precision=fp16",
        reason="each replica would have its own loss scale",
        instead="precision=bf16",
    ),
    Refusal(
        when="sync!=step wire!=auto",
        reason="parameters are exchanged in the dtype of the masters, and no gradients",
        instead="wire=auto",
    ),
    Refusal(
        when="sync!=step offload.optimizer!=device",
        reason="replicas agree about state on the device",
        instead="offload=none",
    ),
    Refusal(when="dp=1 sync!=step", reason="only replicas agree across steps", instead="sync=step"),
)
"""All combinations that are refused. A new feature removes its rows; a feature with a limit adds a row."""
