"""The plan: all choices of how to split a model over ranks, as one frozen value (`Plan`).

Choices in several places may contradict each other, which may show only at step 40. A plan is written in one place: as
a line of text (`dp=2 zero=1`), a TOML table or keywords. Its creation checks all keys together."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.base.mesh import Mesh
from meshwise.plan.compatibility import ALONE, COMPATIBILITY, Refusal
from meshwise.plan.mesh_axes import AXES, GRIDS, REPLICAS, factorisations, folded_mesh
from meshwise.plan.plan_keys import (
    LARGEST_COUNT,
    Offload,
    PlanError,
    Wire,
    check_keys,
    keys_of,
    plan_key,
    plan_notation,
    read_words,
)


@dataclass(frozen=True)
class Plan:
    """Plan for splitting a model over ranks: `Plan.parse("dp=2 zero=1")` or `Plan(dp=2, zero=1)`.

    `keys.toml` has the meaning and the values of each key, and docs/plans.md shows them.

    Prints as the shortest line that parses back. Raises PlanError for a value out of range or a refused combination."""

    dp: int | None = plan_key("dp")
    tp: int = plan_key("tp")
    pp: int = plan_key("pp")
    cp: int = plan_key("cp")
    context: str = plan_key("context")
    cp_heads: int = plan_key("cp_heads")
    ep: int = plan_key("ep")
    etp: int = plan_key("etp")
    dispatch: str = plan_key("dispatch")
    chunk: int = plan_key("chunk")
    dispatch_parts: int = plan_key("dispatch_parts")
    replicate: int = plan_key("replicate")
    zero: int = plan_key("zero")
    shards: int = plan_key("shards")
    hpz: int = plan_key("hpz")
    prefetch: int = plan_key("prefetch")
    overlap_gather: int = plan_key("overlap_gather")
    bucket: int | None = plan_key("bucket")
    microbatches: int = plan_key("microbatches")
    overlap_microbatches: int = plan_key("overlap_microbatches")
    tp_mode: str = plan_key("tp_mode")
    tp_depth: int = plan_key("tp_depth")
    sequence_parallel: int = plan_key("sequence_parallel")
    random: str = plan_key("random")
    schedule: str = plan_key("schedule")
    virtual_stages: int = plan_key("virtual_stages")
    partition: str = plan_key("partition")
    recompute: str = plan_key("recompute")
    budget: int = plan_key("budget")
    compile: str = plan_key("compile")
    deterministic: int = plan_key("deterministic")
    precision: str = plan_key("precision")
    wire: str = plan_key("wire", parse=Wire.parse)
    feedback: int = plan_key("feedback")
    gather: str = plan_key("gather")
    sync: str = plan_key("sync")
    every: int = plan_key("every")
    server: int = plan_key("server")
    staleness: str = plan_key("staleness")
    correction: str = plan_key("correction")
    offload: str = plan_key("offload", parse=Offload.parse)

    def __post_init__(self) -> None:
        for key, value in self._items():
            object.__setattr__(self, key, keys_of(Plan)[key].read(value))
        self.check()

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Return the plan that `text` states, as `key=value` words in any order. Raises PlanError."""
        return cls.from_toml(read_words(text))

    @classmethod
    def of(cls, plan: "Plan | str") -> "Plan":
        """Return a `Plan` unchanged, and a text parsed. Raises PlanError for an invalid text or another type."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str):
            return cls.parse(plan)
        raise PlanError(
            f"a plan is a line of text, as in 'dp=2 zero=1', or a Plan, not of {type(plan)}; for a table, call "
            "Plan.from_toml(table)"
        )

    @classmethod
    def from_toml(cls, table: Mapping[str, Any]) -> "Plan":
        """Return the plan with the keys of a TOML table, as in `{"dp": "auto", "zero": 1}`. Raises PlanError."""
        check_keys(table, known=keys_of(Plan))
        return cls(**table)

    def to_toml(self) -> dict[str, int | str]:
        """Return every key with its value, as a TOML table that `from_toml` reads back."""
        keys = keys_of(Plan)
        return {key: keys[key].show(value) for key, value in self._items()}

    def __str__(self) -> str:
        shown = {key: value for key, value in self.to_toml().items() if getattr(self, key) != getattr(Plan, key)}
        if self.shards and self.dp is not None and self.dp % self.shards == 0:
            rest = {key: value for key, value in shown.items() if key not in ("dp", "shards")}
            shown = {"dp": f"{self.dp // self.shards}x{self.shards}", **rest}
        return " ".join(f"{key}={plan_notation(value)}" for key, value in shown.items()) or "dp=1"

    def check(self, more: Sequence[Refusal] = (), *, by: str = "") -> None:
        """Raise PlanError when a value is out of range, or the compatibility table or `more` refuse the combination.

        by: text for the message that says whose rows `more` are, such as the name of an optimizer."""
        keys = keys_of(Plan)
        for key, value in self._items():
            keys[key].check(value, name=key)
        if math.prod(self._degrees().values()) > LARGEST_COUNT:
            raise PlanError(f"the plan '{self}' needs more ranks than {LARGEST_COUNT}; take smaller degrees")
        self._grid()
        nearest, reasons = self._working(more)
        if reasons:
            why = f"cannot work{by and f' with {by}'}: {'; '.join(reasons)}"
            raise PlanError(f"the plan '{self}' {why}. Nearest that works: '{nearest}'")
        for key, whole, of in (("shards", self.dp, "dp"), ("hpz", self.shards or self.dp, "shards or dp")):
            if (value := getattr(self, key)) and whole is not None and whole % value:
                near = self._unchecked({key: math.gcd(whole, value)})
                raise PlanError(
                    f"the plan '{self}' cannot divide {whole} ranks of dp into groups of {value}. "
                    f"{key} must divide {of}. Nearest that works: '{near}'"
                )
        if self.dp is not None and self._folded() is None:
            nested = "The ranks that it takes of dp must divide shards and hpz, or be a multiple of them. "
            raise PlanError(
                f"the plan '{self}' cannot divide the experts over its ranks. etp takes the innermost ranks of tp; ep "
                "takes the next ranks of tp, then of cp, then of dp, and must divide them. "
                f"{nested if self.shards or self.hpz > 1 else ''}Nearest that works: '{self._nearest_folded()}'"
            )

    def _working(self, more: Sequence[Refusal] = ()) -> "tuple[Plan, list[str]]":
        """Return the nearest plan that the compatibility table and `more` allow, and why they refuse this plan."""
        nearest, reasons = self, list[str]()
        while refusal := next((row for row in (*more, *COMPATIBILITY) if row.applies(nearest)), None):
            reasons.append(f"{refusal.reason} ({refusal.when})")
            nearest = nearest._unchecked(refusal.changes(nearest))
        return nearest, reasons

    def resolve(self, world_size: int, *, compiles: bool | None = None) -> "Plan":
        """Return this plan with `dp=auto` replaced by the degree that fills `world_size` ranks.

        `compiles`: whether `compile=auto` becomes `blocks` where other keys allow it, or `off`; None: it stays `auto`.

        Raises PlanError, with the nearest plans that work, when the degrees do not multiply to `world_size`."""
        if world_size < 1:
            raise PlanError(f"a world has at least one rank, not {world_size}")
        if compiles is not None and self.compile == "auto":
            works = compiles and not self._unchecked({"compile": "blocks"})._working()[1]
            return dataclasses.replace(self, compile="blocks" if works else "off").resolve(world_size)
        others = math.prod(degree for axis, degree in self._degrees().items() if axis != "dp")
        computing = world_size - self.server
        if self.dp is None and computing > 0 and computing % others == 0:
            return dataclasses.replace(self, dp=computing // others)
        if self.dp is not None and self.dp * others == computing:
            return self
        free = f"at least {self.server + 1}" if self.server else f"a multiple of {others}"
        needs = free if self.dp is None else str(self.dp * others + self.server)
        plans = " or ".join(f"'{plan}'" for plan in self._nearest(world_size))
        raise PlanError(
            f"the plan '{self}' needs {needs} ranks, but the world has {world_size}. "
            f"Start that many, or use the nearest plan for {world_size}: {plans}"
        )

    def mesh(self) -> Mesh:
        """Return the mesh with the axes `pp dp cp` and the axes of tp's grid. Raises ValueError while dp is auto.

        tp_mode    1d: tp    2d: row col    2.5d: depth row col    3d: i j l

        With `server`, the last ranks of dp are the servers.

        `ep`, `etp`, `outer` and `node` are joint axes. An axis that they take in part becomes several axes. Ranks along
        `outer` hold replicas of the same shards. Ranks along `node` hold the same part of a second copy (`hpz`)."""
        if self.dp is None:
            raise ValueError(f"the plan '{self}' has no mesh yet: resolve(world_size) fills in dp=auto")
        mesh = self._folded()
        assert mesh is not None
        return mesh

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Names of the axes of tp's grid."""
        return tuple(axis for axis, _ in self._grid())

    @property
    def with_whole_experts(self) -> "Plan":
        """Plan with the same keys, but all experts on every rank."""
        return dataclasses.replace(self, ep=1, etp=1, dispatch="auto", chunk=0, dispatch_parts=1, replicate=0)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different samples of the batch."""
        return (*REPLICAS, *GRIDS[self.tp_mode].rows)

    @property
    def row_parts(self) -> int:
        """Number of parts into which the ranks divide the rows of a batch. Raises ValueError while dp is auto."""
        return math.prod(map(self.mesh().degree, self.row_axes)) - self.server

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different tokens of the same samples."""
        return ("cp",) if self.cp > 1 else ()

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which sums and counts of the loss are added: the ranks hold different samples or tokens."""
        return (*self.row_axes, *self.token_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold copies of the same parameters under every `tp_mode`, and sum their gradients."""
        return self.token_axes if self.sync_axes and self.apart_axes else (*REPLICAS, *self.token_axes)

    @property
    def sync_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold replicas that agree across steps, and differ meanwhile; none under `sync=step`."""
        return () if self.sync == "step" else REPLICAS

    @property
    def staleness_bound(self) -> int | None:
        """Steps by which a worker may run ahead of the slowest one; None under `staleness=async`."""
        return None if self.staleness == "async" else int(self.staleness)

    @property
    def asynchronous(self) -> bool:
        """True if workers push gradients to servers at their own pace, as with `server=1 staleness=2`."""
        return self.server > 0 and self.staleness != "0"

    @property
    def apart_axes(self) -> tuple[str, ...]:
        """Axes whose ranks step independently: replicas that agree across steps (not by `momenta`), or late workers."""
        return REPLICAS if self.asynchronous else () if self.sync == "momenta" else self.sync_axes

    @property
    def codec(self) -> tuple[str, float] | None:
        """Name and number of the codec in `wire`; None if it is a dtype."""
        wire = Wire.parse(self.wire)
        return None if wire.codec == "none" else (wire.codec, wire.number)

    @property
    def tiers(self) -> Offload:
        """The key `offload`, parsed: the tier of each part of the training's state."""
        return Offload.parse(self.offload)

    def _grid(self) -> tuple[tuple[str, int], ...]:
        """Return the axes of tp's grid with their degrees. Raises PlanError when tp ranks do not form it."""
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

    def _folded(self) -> Mesh | None:
        """Return the mesh, with 1 for `auto`; None if `ep` and `etp` do not divide its axes."""
        axes = [(axis, (getattr(self, axis) or 1) + self.server * (axis == "dp")) for axis in AXES[:-1]]
        shards = self.shards or dict(axes)["dp"]
        near = self.hpz if self.hpz > 1 else shards
        return folded_mesh([*axes, *self._grid()], ep=self.ep, etp=self.etp, shards=shards, near=near)

    def _nearest_folded(self) -> "Plan":
        """Return this plan with the nearest `ep` and `etp` that its axes can be divided by."""
        most = max(self.ep, self.etp)
        plans = [self._unchecked({"ep": ep, "etp": etp}) for ep in range(1, most + 1) for etp in range(1, most + 1)]
        ratio = lambda plan: abs(math.log(plan.ep / self.ep)) + abs(math.log(plan.etp / self.etp))  # noqa: E731
        return min((plan for plan in plans if plan._folded() is not None), key=ratio)

    def _items(self) -> Iterator[tuple[str, Any]]:
        return ((key, getattr(self, key)) for key in keys_of(Plan))

    def _degrees(self) -> dict[str, int]:
        """Return the degree of each axis; 1 for `auto`."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    def _unchecked(self, changes: Mapping[str, int | str | None]) -> "Plan":
        """Return this plan with changes, without checking it."""
        plan = object.__new__(type(self))
        for key, value in (dict(self._items()) | dict(changes)).items():
            object.__setattr__(plan, key, value)
        return plan

    def _nearest(self, world_size: int) -> "list[Plan]":
        """Return at most two plans that fill `world_size` ranks and change the degrees by the smallest factors."""
        degrees = self._degrees()
        plans = []
        servers = self.server if self.server < world_size else 0
        for filling in factorisations(world_size - servers, parts=len(AXES)):
            changes: dict[str, Any] = dict(zip(AXES, filling, strict=True)) | {"server": servers}
            changes["shards"] = math.gcd(self.shards, changes["dp"]) if self.shards else 0
            changes["hpz"] = math.gcd(self.hpz, changes["shards"] or changes["dp"])
            if any(changes[axis] > 1 and degrees[axis] == 1 for axis in AXES if axis != "dp"):
                continue
            plan, _ = self._unchecked(changes)._working(ALONE)
            with contextlib.suppress(PlanError):
                plan.check()
                plans.append(plan)

        def distance(plan: Plan) -> float:
            return sum(abs(math.log(degree / degrees[axis])) for axis, degree in plan._degrees().items())

        return sorted(plans, key=distance)[:2]
