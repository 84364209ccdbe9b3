"""Combinations of keys that `Plan.check` refuses (`compatibility.toml`), each with the nearest plan that works."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq, ge, gt, ne
from typing import Any

from meshwise.base.package_table import package_table
from meshwise.plan.plan_keys import keys_of


@dataclass(frozen=True)
class Refusal:
    """Row of the compatibility table, in the notation of plans.

    | when      conditions: a plan that meets all of them is refused, as in `pp>1 zero>=2` or `offload.params!=device`
    | instead   the change that leads to the nearest plan that works, such as `tp_mode=1d`
    | reason    why such a plan cannot work"""

    when: str
    instead: str
    reason: str

    def applies(self, plan: Any) -> bool:
        """Return whether `plan` meets every condition. A degree of None (`auto`) meets no condition."""
        keys = keys_of(plan.__class__)
        for key, part, holds, bound in _conditions(self.when):
            value, parse = getattr(plan, key), keys[key].parse
            if part and parse is not None:
                value = getattr(parse(value), part)
            if value is None or not holds(value, bound if keys[key].words else int(bound)):
                return False
        return True

    def changes(self, plan: Any) -> dict[str, int | str]:
        """Return the key that `instead` changes, with its new value. `plan`: its class has the type of the key."""
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


_TABLES: Mapping[str, list[list[str]]] = package_table("plan/compatibility.toml")
COMPATIBILITY = tuple(Refusal(*row) for row in _TABLES["refused"])
"""All combinations that are refused. A new feature removes its rows; a feature with a limit adds a row."""
ALONE = tuple(Refusal(*row) for row in _TABLES["alone"])
"""Combinations that are refused unless the job joins others (`train.sync.join`)."""
MOMENTUM_EXCHANGE = tuple(Refusal(*row) for row in _TABLES["momentum_exchange"])
"""Combinations that are refused with an optimizer that exchanges momenta, such as `OneBitAdam`."""
