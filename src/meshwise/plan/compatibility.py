"""Combinations that are refused: a table for the check of a plan, the documentation and the tests."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq, ge, gt, ne
from typing import Any

from meshwise.plan.plan_keys import Offload, keys_of


@dataclass(frozen=True)
class Refusal:
    """A row of the compatibility table, all in the notation of plans.

    when     conditions that hold together, as in `tp>1`, `pp>1 zero>=2`, `tp_mode=3d` or `offload.params!=device`
    reason   why that cannot work
    instead  the changes that lead to the nearest plan that works; a value is a word, or a product of numbers and keys,
             as in `tp_mode=1d` or `tp=1 dp=dp*tp`
    """

    when: str
    reason: str
    instead: str

    def applies(self, plan: object) -> bool:
        """Return whether every condition holds for `plan`. A degree that is not known yet (`auto`) meets none."""
        keys = keys_of(plan)
        for key, part, holds, bound in _conditions(self.when):
            value = getattr(plan, key)
            value = getattr(Offload.parse(value), part) if part else value
            if value is None or not holds(value, bound if keys[key].words else int(bound)):
                return False
        return True

    def changes(self, plan: object) -> dict[str, int | str | None]:
        """Return the values that `instead` gives the keys it names."""
        keys = keys_of(plan)
        changed: dict[str, int | str | None] = {}
        for change in self.instead.split():
            key, product = change.split("=")
            if keys[key].words:
                changed[key] = product
                continue
            factors = [int(name) if name.isdigit() else getattr(plan, name) for name in product.split("*")]
            changed[key] = None if None in factors else math.prod(factors)
        return changed


@cache
def _conditions(when: str) -> Sequence[tuple[str, str, Callable[[Any, Any], bool], str]]:
    """Return the key, the part of its value, and what has to hold between that and a bound."""
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
        reason="only zero=3 brings parameters together for their use and puts them to rest after it",
        instead="zero=3",
    ),
    Refusal(when="cp>1", reason="context parallelism is not built yet", instead="cp=1 dp=dp*cp"),
    Refusal(when="ep>1", reason="expert parallelism is not built yet", instead="ep=1 dp=dp*ep"),
)
"""What cannot work together. A part that lands deletes its row; a part that meets a limit adds one."""
