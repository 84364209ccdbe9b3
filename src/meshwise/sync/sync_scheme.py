"""The table of schemes by which replicas agree across steps (`SCHEMES`): local SGD, DiLoCo and gossip are rows.

docs/local_steps.md has a table of them, with their papers. A new scheme is a new row, for `Replicas` to interpret.

In gossip, replicas mix their parameters with the neighbours in a graph (`mixing_weights`), which keeps their mean. In
round k of the exponential graph, replica r takes half of replica r - 2^k mod n (Assran, arXiv 1811.10792). An edge has
the weight 1 / (1 + the larger degree of its ends), after Metropolis and Hastings."""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshwise.plan import Plan
from meshwise.plan.compatibility import ALONE

_EDGES = re.compile(r"\d+-\d+(,\d+-\d+)*")


def mixing_weights(graph: str, *, size: int, round_number: int) -> list[Mapping[int, float]]:
    """Return for each of `size` replicas the weight of each replica whose parameters it takes, itself included.

    `round_number`: used by the graph `exponential`, whose neighbours change with the round."""
    if size == 1:
        return [{0: 1.0}]
    if graph == "exponential":
        hop = 2 ** (round_number % math.ceil(math.log2(size)))
        return [{replica: 0.5, (replica - hop) % size: 0.5} for replica in range(size)]
    neighbours: list[set[int]] = [set() for _ in range(size)]
    for one, other in _edges(graph, size):
        if one != other:
            neighbours[one].add(other)
            neighbours[other].add(one)
    shares = [{other: 1 / (1 + max(len(own), len(neighbours[other]))) for other in sorted(own)} for own in neighbours]
    return [{replica: 1 - math.fsum(row.values()), **row} for replica, row in enumerate(shares)]


def check_graph(graph: str, *, size: int) -> None:
    """Raise ValueError if a text names no graph of `size` replicas, or lists edges that do not connect all of them."""
    if graph in ("all", "ring", "torus", "exponential"):
        return
    if found := re.fullmatch(r"groups:([1-9]\d*)", graph):
        if size % int(found[1]):
            raise ValueError(f"sync: graph={graph} does not divide the {size} replicas of the plan; write graph=ring")
        return
    if not _EDGES.fullmatch(graph):
        raise ValueError(
            f"sync: graph={graph!r} is no graph; write ring, torus, exponential, groups:2 or edges such as "
            f"{','.join(f'{one}-{one + 1}' for one in range(max(1, size - 1)))}"
        )
    edges, reached = _edges(graph, size), {0}
    for _ in range(size):
        reached |= {end for edge in edges for end in edge if reached & set(edge)}
    if reached != set(range(size)) or not reached.issuperset(itertools.chain(*edges)):
        raise ValueError(
            f"sync: graph={graph} must connect the replicas 0 to {size - 1}, and name no others, or they never "
            f"agree. Write graph={','.join(f'{one}-{one + 1}' for one in range(size - 1)) or 'ring'}"
        )


def _edges(graph: str, size: int) -> list[tuple[int, int]]:
    """Return the undirected edges of a graph; an edge may occur twice."""
    if graph == "ring":
        return [(one, (one + 1) % size) for one in range(size)]
    if graph == "torus":
        rows = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
        columns = size // rows
        right = [(n, n - n % columns + (n + 1) % columns) for n in range(size)]
        return right + [(n, (n + columns) % size) for n in range(size)]
    if graph.startswith("groups:"):
        width = int(graph.removeprefix("groups:"))
        starts = range(0, size, width)
        return [edge for start in starts for edge in itertools.combinations(range(start, start + width), 2)]
    return [(int(one), int(other)) for one, _, other in (edge.partition("-") for edge in graph.split(","))]


_KINDS = MappingProxyType({bool: "true or false", int: "whole number", float: "finite number", str: "text"})
STATE_CHOICES = ("keep", "mean", "reset")
"""Values of `SyncScheme.state`."""


@dataclass(frozen=True)
class SyncScheme:
    """One row of the table: how the replicas of a plan agree. Raises ValueError for values that do not go together."""

    every: int = 1
    """Number of steps of a round, at whose end the replicas agree. The plan's key `every`."""
    graph: str = "all"
    """Neighbours that agree: `all`; `ring`, `torus`, `exponential`; `groups:2`; or edges such as `0-1,1-2,0-2`."""
    outer_lr: float = 1.0
    """Factor of the outer step. With an outer momentum of 0 it moves from the last agreed parameters to the mean."""
    outer_momentum: float = 0.0
    """Momentum of the outer step."""
    nesterov: bool = False
    """True: Nesterov's form of the outer momentum."""
    scaled_by_lr: bool = False
    """True: the outer momentum is kept in units of the replicas' mean learning rate, as SlowMo does."""
    state: str = "keep"
    """The tensors of the optimizer's state when all replicas agree: `keep` each replica's own, take the `mean`, or
    `reset` them. Replicas that mix with neighbours keep their own."""
    after: int = 0
    """Steps at the start of the training in which the replicas agree after every step (post-local SGD)."""
    group: int = 0
    """Replicas of a group, which agree after each `group_every` steps by the mean of their parameters. 0: no groups."""
    group_every: int = 1
    """Steps after which the replicas of a group agree; used with `group`."""
    fragments: int = 1
    """Fragments of the model, which agree at different steps of a round; unit u is in fragment u mod `fragments`."""
    delay: int = 0
    """Steps from the start of an exchange to its application; training continues meanwhile. Less than `every`."""
    blend: float = 0.0
    """Share of a replica's own parameters that it keeps when the agreed parameters are applied: 0 to below 1."""
    elastic: bool = False
    """True: replicas move towards the previous agreed parameters, and `blend` is 1 - outer_lr / replicas (EASGD)."""
    join: str = ""
    """HOST:PORT of `meshwise meet`, where jobs meet whose replicas agree with those of this job. `alone`: no other job
    joins; needed with `dp=1`. Empty: the replicas are the ones of the plan."""
    patience: float = 60.0
    """Seconds without a sign of life after which a job that joins others drops one of them."""
    least: int = 1
    """Jobs that must come to `join` before a training begins."""
    wire: str = "auto"
    """Codec of the changes that replicas send. `auto`: the dtype of the masters. The plan's key `wire`."""
    feedback: int = 1
    """1: compression errors are added to the next change of the replica. The plan's key `feedback`."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, like = getattr(self, item.name), type(item.default)
            kinds = (int, float) if like is float else like
            fits = isinstance(value, kinds) and isinstance(value, bool) == (like is bool)
            if not fits or (like is float and not math.isfinite(value)):
                raise ValueError(f"sync: {item.name}={value!r} is no {_KINDS[like]}; write {item.name}={item.default}")
        smallest = {"every": 1, "after": 0, "group": 0, "group_every": 1, "fragments": 1, "delay": 0, "least": 1}
        for key, least in smallest.items():
            if (value := getattr(self, key)) < least:
                raise ValueError(f"sync: {key}={value!r} is no whole number of at least {least}; write {key}={least}")
        if self.state not in STATE_CHOICES:
            raise ValueError(f"sync: state={self.state!r} is none of {', '.join(STATE_CHOICES)}; write state=keep")
        if not (0 <= self.outer_momentum < 1 and 0 <= self.blend < 1 and self.outer_lr > 0):
            raise ValueError(
                f"sync: outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, blend={self.blend}: the rate "
                "is above 0, the other two from 0 to below 1; write outer_lr=0.7 outer_momentum=0.9 blend=0.0"
            )
        if self.fragments > self.every or self.delay >= self.every:
            raise ValueError(
                f"sync: fragments={self.fragments} and delay={self.delay} do not fit a round of every={self.every} "
                f"steps; write fragments=1 delay=0, or every={max(self.fragments, self.delay + 1)} in the plan"
            )
        if self.join and (not re.fullmatch(r"alone|\S+:\d+", self.join) or not self.patience > 0):
            raise ValueError(f"sync: join={self.join!r} patience={self.patience}; write join=HOST:29400 patience=60")
        if self.join and (self.graph != "all" or self.group or self.delay or self.elastic or self.wire != "auto"):
            raise ValueError(
                f"sync: join={self.join} needs the mean of all replicas, at once and whole; write sync=local, slowmo "
                "or diloco and wire=auto in the plan, and delay=0 group=0"
            )
        if self.state == "mean" and self.delay:
            raise ValueError(
                f"sync: delay={self.delay} would set the optimizer's state back by as many steps under state=mean; "
                "write state=keep"
            )
        if self.graph != "all" and (self.has_anchor or self.fragments > 1 or self.group):
            raise ValueError(
                f"sync: graph={self.graph} mixes the parameters of neighbours, but an outer step, a codec, fragments, "
                "a delay and groups need the mean of all; write graph=all"
            )
        if self.group and (self.has_anchor or self.fragments > 1):
            raise ValueError(
                f"sync: group={self.group} agrees about whole parameters, without an outer step and fragments; write "
                "group=0, or fragments=1 and, in the plan, sync=local and wire=auto"
            )

    @property
    def has_anchor(self) -> bool:
        """True if the replicas keep the last agreed parameters, from which the outer step begins."""
        return (self.outer_lr, self.outer_momentum, self.blend, self.delay, self.wire) != (1.0, 0.0, 0.0, 0, "auto")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the outer state: tensors of the parameters' shapes, equal on all replicas except `outer_error`."""
        error = self.wire != "auto" and self.feedback
        kept = {"agreed": True, "outer_momentum": self.outer_momentum, "outer_change": self.delay, "outer_error": error}
        return tuple(name for name, value in kept.items() if value and self.has_anchor)

    def kinds_of_steps(self, *, replicas: int) -> dict[int, int]:
        """Return a step of each kind, ascending, and how many steps of a round are of this kind.

        Steps of one kind end with equal exchanges. After a round the exchanges of `replicas` replicas repeat."""
        hops = max(1, math.ceil(math.log2(replicas))) if self.graph == "exponential" else 1
        steps = math.lcm(self.every * hops, self.group_every if self.group else 1)
        offsets = [(end - lag - 1) % self.every + 1 for end in self._ends for lag in (0, self.delay)]
        kinds = {hop * self.every + offset: steps // self.every // hops for hop in range(hops) for offset in offsets}
        if self.group:
            kinds.setdefault(self.group_every, steps // self.group_every - 1)
        quiet = next(step for step in itertools.count(1) if step not in kinds)
        kinds[quiet] = steps - sum(kinds.values())
        return {step: times for step, times in sorted(kinds.items()) if times}

    @property
    def _ends(self) -> list[int]:
        """Last step of each fragment's exchange in the first round."""
        return [(number + 1) * self.every // self.fragments for number in range(self.fragments)]

    def fragments_to_apply(self, step: int) -> tuple[int, ...]:
        """Return the fragments that all replicas apply after step number `step`, which counts from 1."""
        if step <= self.after:
            return tuple(range(self.fragments))
        ended = (number for number, end in enumerate(self._ends) if (step - end) % self.every == 0)
        return tuple(ended) if step > self.delay else ()

    def fragments_to_begin(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose exchange begins after step number `step`: without a delay, those to apply then."""
        return self.fragments_to_apply(step + self.delay)

    def in_groups(self, step: int) -> bool:
        """Return whether the replicas of each group agree after step number `step`."""
        return bool(self.group) and step % self.group_every == 0 and not self.fragments_to_apply(step)


SCHEMES: Mapping[str, SyncScheme] = MappingProxyType(
    {
        "local": SyncScheme(state="mean"),
        "slowmo": SyncScheme(outer_momentum=0.7, scaled_by_lr=True),
        "diloco": SyncScheme(outer_lr=0.7, outer_momentum=0.9, nesterov=True),
        "gossip": SyncScheme(graph="ring"),
        "easgd": SyncScheme(outer_lr=0.9, elastic=True),
        "momenta": SyncScheme(),
    }
)
"""The row of each value of the plan's key `sync`, except `step`. Under `momenta` the optimizer exchanges momenta."""


def sync_scheme(plan: Plan, *, settings: Mapping[str, Any]) -> SyncScheme:
    """Return the row of the table that a plan names, with some of its fields changed by `settings`.

    Raises ValueError for an unknown setting, and for settings that do not fit each other or the plan's replicas."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"sync={settings!r} is no table of settings; write sync={{'outer_lr': 0.5}}")  # noqa: TRY004 - as for all settings
    of_plan: dict[str, Any] = {"every": plan.every, "wire": plan.wire, "feedback": plan.feedback}
    known = [item.name for item in dataclasses.fields(SyncScheme) if item.name not in of_plan]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
            hint = f"it is a key of the plan: write {key}={settings[key]} there" if key in of_plan else hint
            raise ValueError(f"sync has no setting {key!r}; {hint}")
    scheme = dataclasses.replace(SCHEMES[plan.sync], **of_plan, **settings)
    plan.check(() if scheme.join else ALONE)
    replicas = math.prod(map(plan.mesh().degree, plan.sync_axes))
    if scheme.elastic and ("blend" in settings or scheme.outer_lr > replicas):
        raise ValueError(f"sync: the blend of easgd is 1 - outer_lr / {replicas}; leave blend out, set outer_lr=0.9")
    if scheme.elastic:
        scheme = dataclasses.replace(scheme, blend=1 - scheme.outer_lr / replicas)
    if plan.tiers.outer != "device" and not scheme.has_anchor:
        raise ValueError(f"sync={plan.sync} keeps nothing between agreements; write offload=none, or sync=diloco")
    if scheme.after and scheme.delay:
        raise ValueError(f"sync: after={scheme.after} agrees at once, and delay={scheme.delay} later; write delay=0")
    check_graph(scheme.graph, size=replicas)
    if scheme.group and replicas % scheme.group:
        raise ValueError(f"sync: group={scheme.group} does not divide the {replicas} replicas; write group=1")
    return scheme
