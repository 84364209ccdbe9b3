"""The Plan: everything the user chose about how to split a model, as one frozen value.

A choice that is spread over a config file, environment variables and constructor arguments contradicts itself, and
what cannot work together shows at step 40. A plan is one line of text (`dp=2 zero=1`), a TOML table or keywords; all
three are the same value, which checks itself when it is made. The table `COMPATIBILITY` below says what cannot work
together; the check, the documentation (`plans_page`) and the tests all read it, so they cannot disagree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import eq, ge, gt, ne
from typing import Any

from meshwise.mesh import Mesh

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes of a plan's mesh, outermost first: the most talkative axis, tp, joins neighbouring ranks."""


class PlanError(ValueError):
    """A plan that cannot work; the message names the conflict and the nearest plan that works."""


@dataclass(frozen=True)
class Key:
    """What a plan key means, and the values it takes: whole numbers between two, or one of a few words."""

    meaning: str
    least: int
    most: int | None = None
    words: tuple[str, ...] = ()


def _key(default: int, meaning: str, *, least: int = 1, most: int | None = None) -> Any:
    return field(default=default, metadata={"key": Key(meaning, least, most)})


def _word(words: str, meaning: str) -> Any:
    """A key that takes one of `words`, the first by default."""
    choices = tuple(words.split())
    return field(default=choices[0], metadata={"key": Key(meaning, 0, words=choices)})


@dataclass(frozen=True)
class Refusal:
    """A row of the compatibility table, all in the notation of plans.

    when     conditions that hold together, as in `tp>1`, `pp>1 zero>=2` or `tp_mode=3d`
    reason   why that cannot work
    instead  the changes that lead to the nearest plan that works; a value is a word, or a product of numbers and keys,
             as in `tp_mode=1d` or `tp=1 dp=dp*tp`
    """

    when: str
    reason: str
    instead: str

    def applies(self, plan: Plan) -> bool:
        """Whether every condition holds for `plan`. A degree that is not known yet (`auto`) meets none."""
        comparisons: Mapping[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "=": eq, "!=": ne}
        for condition in self.when.split():
            key, sign, bound = re.split(r"(>=|!=|>|=)", condition)
            value = getattr(plan, key)
            if value is None or not comparisons[sign](value, bound if _KEYS[key].words else int(bound)):
                return False
        return True

    def changes(self, plan: Plan) -> dict[str, int | str | None]:
        """The values that `instead` gives the keys it names."""
        changed: dict[str, int | str | None] = {}
        for change in self.instead.split():
            key, product = change.split("=")
            if _KEYS[key].words:
                changed[key] = product
                continue
            factors = [int(name) if name.isdigit() else getattr(plan, name) for name in product.split("*")]
            changed[key] = None if None in factors else math.prod(factors)
        return changed


COMPATIBILITY = (
    Refusal(
        when="tp_mode!=1d sequence_parallel>0",
        reason="2d, 2.5d and 3d split every activation already",
        instead="sequence_parallel=0",
    ),
    Refusal(when="tp_mode!=2.5d tp_depth>1", reason="only 2.5d has a depth", instead="tp_depth=1"),
    Refusal(
        when="pp>1 sequence_parallel>0",
        reason="a stage leaves the forward before the tokens of a sequence are together again",
        instead="sequence_parallel=0",
    ),
    Refusal(when="cp>1", reason="context parallelism is not built yet", instead="cp=1 dp=dp*cp"),
    Refusal(when="ep>1", reason="expert parallelism is not built yet", instead="ep=1 dp=dp*ep"),
)
"""What cannot work together. A part that lands deletes its row; a part that meets a limit adds one."""


@dataclass(frozen=True)
class Grid:
    """The shape of tp's ranks: axes of one side each (`depth` aside), of which some split the rows of the batch."""

    axes: str
    power: int
    needs: str
    rows: tuple[str, ...]


GRIDS: Mapping[str, Grid] = {
    "1d": Grid("tp", 1, "any number of", ()),
    "2d": Grid("row col", 2, "a square number of", ("row",)),
    "2.5d": Grid("depth row col", 2, "tp_depth times a square number of", ("depth", "row")),
    "3d": Grid("i j l", 3, "a cubic number of", ("i", "j")),
}
"""What each `tp_mode` makes of the axis tp."""


@dataclass(frozen=True)
class Plan:
    """How to split a model over ranks: `Plan.parse("dp=2 zero=1")` or `Plan(dp=2, zero=1)`.

    Prints as the shortest line that parses back. Raises PlanError for a value out of range or a combination that the
    compatibility table refuses.
    """

    dp: int | None = _key(1, "replicas of the model, each with its own rows of the batch; `auto` fills the world")
    tp: int = _key(1, "ranks that split each matrix")
    pp: int = _key(1, "stages that split the sequence of blocks")
    cp: int = _key(1, "ranks that split each sequence of tokens")
    ep: int = _key(1, "ranks that split the experts of a mixture")
    zero: int = _key(
        0, "what the replicas share out: 1 optimizer state, 2 and gradients, 3 and parameters", most=3, least=0
    )
    microbatches: int = _key(1, "parts that each rank cuts its share of a step's batch into, one after the other")
    tp_mode: str = _word(
        "1d 2d 2.5d 3d", "how tp splits a matrix: over a row, a q x q grid, d such grids, a p x p x p cube"
    )
    tp_depth: int = _key(1, "grids behind each other under `tp_mode=2.5d`")
    sequence_parallel: int = _key(0, "1: between matrices, tp splits the tokens of a sequence", least=0, most=1)
    random: str = _word(
        "global local", "dropout masks: the same under every plan, or drawn by torch's own kernels, fused on a GPU"
    )
    schedule: str = _word(
        "1f1b naive gpipe interleaved looped zb-h1 zb-h2 zb-v dualpipev", "order of a pipeline's forwards and backwards"
    )
    virtual_stages: int = _key(1, "stages that each rank of a pipeline holds")
    partition: str = _word("time params memory", "what a pipeline's stages are balanced by")

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan written as `key=value` words in any order. Raises PlanError."""
        values: dict[str, Any] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals:
                raise PlanError(f"{word!r} in the plan {text!r} is not key=value; write it as in 'dp=2 zero=1'")
            if key in values:
                raise PlanError(f"{key} is given twice in the plan {text!r}; keep one of them")
            values[key] = int(value) if re.fullmatch(r"-?[0-9]+", value) else value
        return cls.from_toml(values)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any]) -> Plan:
        """The plan of a TOML table, as in `{"dp": "auto", "zero": 1}`. Raises PlanError."""
        for key in table:
            if key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {' '.join(_KEYS)}"
                raise PlanError(f"unknown plan key {key!r}; {hint}")
        values: dict[str, Any] = {key: None if value == "auto" else value for key, value in table.items()}
        return cls(**values)

    def to_toml(self) -> dict[str, int | str]:
        """Every key with its value, as a TOML table that `from_toml` reads back."""
        return {key: "auto" if value is None else value for key, value in self._items()}

    def __str__(self) -> str:
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        words = [f"{key}={value}" for key, value in self.to_toml().items() if getattr(self, key) != defaults[key]]
        return " ".join(words) or "dp=1"

    def check(self) -> None:
        """Raise PlanError when a value is out of range or the compatibility table refuses the combination."""
        for key, value in self._items():
            _check_value(key, value)
        self._grid()
        reasons = []
        nearest = self
        while refusal := next((row for row in COMPATIBILITY if row.applies(nearest)), None):
            reasons.append(f"{refusal.reason} ({refusal.when})")
            nearest = nearest._unchecked(refusal.changes(nearest))
        if reasons:
            raise PlanError(f"the plan '{self}' cannot work: {'; '.join(reasons)}. Nearest that works: '{nearest}'")

    def resolve(self, world_size: int) -> Plan:
        """This plan with `dp=auto` filled in for a world of `world_size` ranks.

        Raises PlanError, with the nearest plans that work, when the degrees do not multiply to `world_size`.
        """
        if world_size < 1:
            raise PlanError(f"a world has at least one rank, not {world_size}")
        others = math.prod(degree for axis, degree in self._degrees().items() if axis != "dp")
        if self.dp is None and world_size % others == 0:
            return dataclasses.replace(self, dp=world_size // others)
        if self.dp is not None and self.dp * others == world_size:
            return self
        needs = f"a multiple of {others}" if self.dp is None else str(self.dp * others)
        plans = " or ".join(f"'{plan}'" for plan in self._nearest(world_size))
        raise PlanError(
            f"the plan '{self}' needs {needs} ranks, but the world has {world_size}. "
            f"Start that many, or use the nearest plan for {world_size}: {plans}"
        )

    def mesh(self) -> Mesh:
        """The mesh with the axes `pp dp cp ep` and those of tp's grid. Raises ValueError while dp is auto.

        tp_mode    1d: tp    2d: row col    2.5d: depth row col    3d: i j l
        """
        if self.dp is None:
            raise ValueError(f"the plan '{self}' has no mesh yet: resolve(world_size) fills in dp=auto")
        return Mesh((*((axis, getattr(self, axis)) for axis in AXES[:-1]), *self._grid()))

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes of tp's grid."""
        return tuple(axis for axis, _ in self._grid())

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold other rows of the batch."""
        return ("dp", *GRIDS[self.tp_mode].rows)

    def _grid(self) -> tuple[tuple[str, int], ...]:
        """The axes of tp's grid with their degrees. Raises PlanError when tp ranks do not form it."""
        grid = GRIDS[self.tp_mode]
        depth = self.tp_depth if "depth" in grid.axes else 1
        side = max(1, round((self.tp / depth) ** (1 / grid.power)))
        filled = side**grid.power * depth
        if filled != self.tp:
            raise PlanError(
                f"tp={self.tp}: {grid.axes} of tp_mode={self.tp_mode} needs {grid.needs} ranks"
                f"{f' with tp_depth={depth}' if depth > 1 else ''}. Nearest that works: 'tp={filled}'"
            )
        return tuple((axis, depth if axis == "depth" else side) for axis in grid.axes.split())

    def _items(self) -> Iterator[tuple[str, Any]]:
        return ((key, getattr(self, key)) for key in _KEYS)

    def _degrees(self) -> dict[str, int]:
        """The degree of each axis, 1 for one that is not known yet."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    def _unchecked(self, changes: Mapping[str, int | str | None]) -> Plan:
        """This plan with changes, before anyone knows whether it works."""
        plan = object.__new__(type(self))
        for key, value in (dict(self._items()) | dict(changes)).items():
            object.__setattr__(plan, key, value)
        return plan

    def _nearest(self, world_size: int) -> list[Plan]:
        """At most two plans that fill `world_size` ranks, those whose degrees change by the smallest factors first."""
        degrees = self._degrees()
        plans = []
        for filling in _factorisations(world_size, len(AXES)):
            changes = dict(zip(AXES, filling, strict=True))
            if any(changes[axis] > 1 and degrees[axis] == 1 for axis in AXES if axis != "dp"):
                continue
            plan = self._unchecked(changes)
            with contextlib.suppress(PlanError):
                plan.check()
                plans.append(plan)
        return sorted(plans, key=lambda plan: _distance(plan._degrees(), degrees))[:2]


_KEYS: Mapping[str, Key] = {item.name: item.metadata["key"] for item in dataclasses.fields(Plan)}


def plans_page() -> str:
    """docs/plans.md: the keys and the compatibility table, as markdown."""
    defaults = Plan()
    keys = [
        f"| `{name}` | `{getattr(defaults, name)}` | {_range(name)} | {key.meaning} |" for name, key in _KEYS.items()
    ]
    rows = [f"| `{row.when}` | {row.reason} | `{row.instead}` |" for row in COMPATIBILITY]
    return "\n".join([_PAGE_HEAD, *keys, _PAGE_MIDDLE, *rows, ""])


def _range(key: str) -> str:
    if _KEYS[key].words:
        return ", ".join(f"`{word}`" for word in _KEYS[key].words)
    most = _KEYS[key].most
    auto = ", or `auto` (None in Python)" if key == "dp" else ""
    return (f"{_KEYS[key].least} and up" if most is None else f"{_KEYS[key].least} to {most}") + auto


def _check_value(key: str, value: Any) -> None:
    """Raise PlanError when a key has a value of the wrong kind or out of its range."""
    if key == "dp" and value is None:
        return
    least, most, words = _KEYS[key].least, _KEYS[key].most, _KEYS[key].words
    if words:
        if value not in words:
            near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.3) or words[:1]
            raise PlanError(f"{key}={value}: {key} is one of {' '.join(words)}. Nearest that works: '{key}={near[0]}'")
        return
    if type(value) is not int:
        given = "auto" if value is None else repr(value)
        raise PlanError(f"{key}={given}: {key} is a whole number, {_range(key)}; write it as in '{key}={least}'")
    nearest = max(least, value if most is None else min(value, most))
    if value != nearest:
        raise PlanError(f"{key}={value}: {key} is {_range(key)}. Nearest that works: '{key}={nearest}'")


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of `parts` ordered factors."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorisations(number // first, parts - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """By which factors the degrees of two plans differ, as a sum of logarithms."""
    return sum(abs(math.log(one[axis] / other[axis])) for axis in AXES)


_PAGE_HEAD = """\
# Plans

A plan says how a model is split. It is one line of text, a TOML table or keywords:

```
meshwise.Plan.parse("dp=2 zero=1") == meshwise.Plan(dp=2, zero=1)
```

The degrees of `pp dp cp ep tp` multiply to the number of ranks, and lie in that order on the mesh: `tp` joins
neighbouring ranks, and is itself a grid under `tp_mode=2d`, `2.5d` and `3d`.
This page is made from `src/meshwise/plan.py` by `make docs`.

| key | default | values | meaning |
|---|---|---|---|"""

_PAGE_MIDDLE = """
## What cannot work together

A plan is refused when it is made, with the reason and the nearest plan that works.

| a plan with | cannot work, because | nearest plan |
|---|---|---|"""
