"""List the plans that a search tries; values that are never better than another value are left out.

docs/planner.md has the values of each key, and why other values are left out ("Candidates"). Plans that the
compatibility table refuses are left out too, and schedules that do not exist for these numbers."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise.base.package_table import package_table
from meshwise.pipeline.schedules.named_schedules import SCHEDULES, planned_schedule
from meshwise.plan import Plan, PlanError
from meshwise.plan.mesh_axes import divisors
from meshwise.plan.plan_keys import is_path, keys_of, read_words

_TABLE = package_table("planner/search_keys.toml")
ROWS: Sequence[int] = _TABLE["rows"]
"""Numbers of rows of a micro-batch to try. For pp=1 all rows of a rank are tried too."""
SEARCHED: Sequence[str] = _TABLE["searched"]
"""Keys of a plan that a search chooses; other keys keep the job's values."""
NEUTRAL_KEYS: Mapping[str, Any] = _TABLE["neutral"]
"""Keys of a plan that do not change the costs of a piece, with values for which no plan is refused."""
UNDIVIDED: Mapping[str, Any] = {**NEUTRAL_KEYS, **_TABLE["undivided"]}
"""Values of keys for a profile in which the model is cut into stages, and no layer or state is split."""


@dataclass(frozen=True)
class PlanSpace:
    """Set of plans that a search considers, for a number of ranks in nodes of equal size."""

    base: Plan
    """Plan of the job; keys that are not in `SEARCHED` keep its values."""
    ranks: int
    node: int
    """Ranks of a node; the largest tp, unless the user fixes tp."""
    batch: int
    """Rows of a global batch."""
    pieces: int
    """Largest number of stages: the number of pieces of the model."""
    experts: int = 1
    """Experts of the model's smallest mixture; 1: the model has none."""
    stages: int | None = None
    """Number of stages if the job fixes the cut; None if the search chooses it."""
    tokens: int = 0
    """Tokens of a sequence; 0 if the batch has no tokens that cp could split."""
    begins: Callable[[int], tuple[str, ...]] | None = None
    """Function that returns, for a number of stages, the first module of each except the first. None: even cuts."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that the user fixes."""

    @property
    def most_rows(self) -> int:
        """Largest number of rows of a micro-batch."""
        return min(max(ROWS), self.batch)

    def plans(self) -> Iterator[Plan]:
        """Yield all plans without memory savings; `leaner` yields the variants with less memory."""
        for tensor, pp in itertools.product(self._tensor(), divisors(self.ranks)):
            each, rest = divmod(self.ranks, tensor["tp"] * pp)
            cp = next((cp for cp in divisors(each) if self._splits(each // cp, cp)), None)
            if rest or cp is None or pp > self.pieces or not self._allows({"pp": pp}):
                continue
            split = {key: self.fixed.get(key, getattr(Plan, key)) for key in _TABLE["split_tokens"]}
            for schedule in self._schedules(pp):
                yield from self._with({"dp": each // cp, "pp": pp, "cp": cp, **split, **tensor, **schedule})

    def leaner(self, plan: Plan, *, tiers: bool) -> Iterator[Plan]:
        """Yield plans with less memory: one key has its next value (with `tiers` also `offload`), or cp replaces dp."""
        for key, values in {**_TABLE["leaner"], **(_TABLE["tiers"] if tiers else {})}.items():
            now = getattr(plan, key)
            uncut = plan.pp == 1 or self.stages
            useless = (key == "zero" and plan.dp == plan.cp == 1) or (key == "partition" and uncut)
            if key in self.fixed or now not in values or useless:
                continue
            for value in values[values.index(now) + 1 :][:1]:
                yield from _made(plan, {key: value})
        by = min(divisors(plan.dp or 1)[1:], default=0)  # fewer rows at a time, each of fewer tokens
        if by and "microbatches" not in self.fixed and self._splits((plan.dp or 1) // by, plan.cp * by):
            fewer = {"dp": (plan.dp or 1) // by, "cp": plan.cp * by, "microbatches": plan.microbatches * by}
            yield from _made(plan, fewer)

    def _splits(self, dp: int, cp: int) -> bool:
        """Return whether each rank gets rows and tokens; two tokens at least where cp splits them."""
        return dp <= self.batch and (cp == 1 or 2 * cp <= self.tokens) and self._allows({"dp": dp, "cp": cp})

    def _with(self, chosen: Mapping[str, Any]) -> Iterator[Plan]:
        """Yield the plans with the chosen degrees and schedule, for all values of the other keys."""
        cuts = ("time",) if chosen["pp"] > 1 and self.stages is None else (self.base.partition,)
        zeros = (0, 1, 3) if chosen["dp"] * chosen["cp"] > 1 else (0,)
        tried: dict[str, Any] = {"partition": cuts, "zero": zeros, "recompute": ("none",), "offload": ("none",)}
        inner = [self.fixed["etp"]] if "etp" in self.fixed else sorted({1, chosen["tp"]} if self.experts > 1 else {1})
        for microbatches, etp in itertools.product(self._microbatches(chosen), inner):
            parts = math.gcd(chosen["dp"] * chosen["tp"] // etp, self.experts)
            tried["ep"] = sorted({1, math.gcd(parts, self.node), parts})
            near = math.gcd(chosen["dp"], max(1, self.node // (chosen["tp"] * chosen["cp"])))
            tried["shards"] = (0, near) if 1 < near < chosen["dp"] else (0,)
            values = [(self.fixed[key],) if key in self.fixed else each for key, each in tried.items()]
            for free in itertools.product(*values):
                changes = {**chosen, "microbatches": microbatches, "etp": etp, **dict(zip(tried, free, strict=True))}
                yield from _made(self.base, changes)

    def _microbatches(self, chosen: Mapping[str, Any]) -> list[int]:
        """Return the numbers of micro-batches to try with which the schedule works."""
        mine = -(-self.batch // Plan(**{key: chosen[key] for key in ("dp", "tp", "tp_mode", "tp_depth")}).row_parts)
        counts = {-(-mine // rows) for rows in ROWS if rows <= mine} | ({1} if chosen["pp"] == 1 else set())
        wanted = [self.fixed["microbatches"]] if "microbatches" in self.fixed else sorted(counts)
        recipe, virtual = SCHEDULES.get(chosen["schedule"]), chosen["virtual_stages"]
        if chosen["pp"] == 1 or recipe is None:
            return wanted
        nearest = lambda count: recipe.nearest(chosen["pp"], microbatches=count, virtual_stages=virtual)  # noqa: E731
        return [count for count in wanted if nearest(count) == (count, virtual)]

    def _tensor(self) -> Iterator[dict[str, Any]]:
        """Yield the combinations of `tp`, `tp_mode`, `tp_depth` and `sequence_parallel` to try."""
        for tp in divisors(self.ranks):
            if tp > self.node and "tp" not in self.fixed:
                continue
            for mode, depth, split in itertools.product(keys_of(Plan)["tp_mode"].words, divisors(tp), (0, 1)):
                chosen = {"tp": tp, "tp_mode": mode, "tp_depth": depth, "sequence_parallel": split}
                trivial = tp == 1 and (mode != "1d" or split)
                flat = mode == "2.5d" and (depth == 1 or depth == tp)
                if self._allows(chosen) and not trivial and not flat and any(True for _ in _made(Plan(), chosen)):
                    yield chosen

    def _schedules(self, pp: int) -> Iterator[dict[str, Any]]:
        """Yield the combinations of `schedule` and `virtual_stages` to try for `pp` ranks."""
        wanted = self.fixed.get("schedule")
        if pp == 1:
            yield {"schedule": Plan.schedule, "virtual_stages": 1}
            return
        for name, recipe in SCHEDULES.items():
            if name != wanted and (wanted or name in _TABLE["never_better"]):
                continue
            least, most = recipe.virtual
            chosen = self.fixed.get("virtual_stages")
            for count in (least,) if most == least else _TABLE["virtual_stages"] if chosen is None else (chosen,):
                if self._allows({"virtual_stages": count}) and self._cuts(pp * count):
                    yield {"schedule": name, "virtual_stages": count}

    def _cuts(self, stages: int) -> bool:
        """Return whether the model can be cut into `stages` stages."""
        ruled = self.begins is None or len(self.begins(stages)) == stages - 1
        return stages <= self.pieces and self.stages in (None, stages) and ruled

    def _allows(self, values: Mapping[str, Any]) -> bool:
        """Return whether these values agree with the fixed values; None agrees with every value."""
        return all(self.fixed.get(key, value) in (value, None) for key, value in values.items())


def splits_backward(plan: Plan) -> bool:
    """Return whether the plan's schedule runs every backward in two parts, for inputs and for weights."""
    if plan.pp > 1 and is_path(plan.schedule):
        return planned_schedule(plan.schedule, pp=plan.pp, microbatches=plan.microbatches).splits_backward
    return plan.pp > 1 and plan.schedule.startswith(("zb-", "dual"))


def parse_fixed(text: str) -> dict[str, Any]:
    """Return the keys and values of a text such as `tp=2 zero=1`. Raises PlanError if no plan can have them."""
    words = read_words(text)
    needed: dict[str, Any] = {"pp": 2} if words.keys() & set(_TABLE["pipelined"]) else {}
    needed |= {"cp": max(2, int(words.get("cp_heads", 2)))} if words.keys() & set(_TABLE["split_tokens"]) else {}
    needed |= {"dp": "auto", "tp": words.get("etp", 1)} if words.keys() & {"ep", "etp"} else {}
    needed |= {"dp": "auto", "zero": 1} if "shards" in words else {}
    plan = Plan.from_toml(needed | words)
    return {key: getattr(plan, key) for key in words}


def _made(plan: Plan, changes: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield the changed plan, or nothing if the compatibility table refuses it."""
    with contextlib.suppress(PlanError):
        yield dataclasses.replace(plan, **changes)
