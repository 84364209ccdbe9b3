"""Find the heads of an attention: their number, their width, and the attributes that count them.

Ranks share whole heads. So for every matrix of an attention three things must be known: how many features stay
together, the order of q, k and v in a fused one, and the numbers in the forward that count heads. After the split, a
forward with `q.view(batch, -1, self.num_heads, self.head_width)` means the heads of its rank.

    | queries      heads x width, cut so that the queries of one key head stay together
    | keys, values key_heads x width
    | output       as the queries
"""

import ast
import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwise.model.parameter_reads import dotted_names, source_of
from meshwise.plan import Plan
from meshwise.tensor.detect.known_names import (
    CONFIGURATIONS,
    FEATURES,
    GROUPS,
    HEAD_WIDTHS,
    HEADS,
    INTERLEAVED,
    KEY_HEADS,
    full_name,
)
from meshwise.tensor.detect.matrix_modules import MatrixModule
from meshwise.tensor.schemes import scheme

_KEEPS_ORDER = frozenset({"clamp", "contiguous", "float", "to", "type_as"})


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention."""

    count: int
    key_count: int
    width: int

    @property
    def features(self) -> int:
        """Features of all heads: what the output matrix reads."""
        return self.count * self.width

    @property
    def keys(self) -> int:
        """Features of all key heads: what the matrices of keys and of values write."""
        return self.key_count * self.width

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.count // self.key_count

    def kv_replicas(self, degree: int) -> int:
        """Return how many of `degree` ranks hold the same key head; 0 when they cannot share the heads evenly."""
        if self.key_count >= degree:
            return 1
        ranks, left = divmod(degree, self.key_count)
        return 0 if left or self.group % ranks else ranks


@dataclass(frozen=True)
class HeadSharing:
    """Sharing of the heads of an attention by the ranks of a plan."""

    ranks: int
    """The number of ranks that share the heads."""
    rows_stay: bool
    """True if ranks have the rows of the hidden states inside a pair too. Under 3d they have other rows: the input is
    not gathered for all linears at once, and ranks cannot hold the same key head, because their axis splits rows."""

    @classmethod
    def of(cls, plan: Plan) -> "HeadSharing":
        """Return how a plan shares heads. Raises ValueError for a plan with `dp=auto`."""
        mesh = plan.mesh()
        ranks = math.prod(mesh.degree(axis) for axis in scheme(plan, blocks=True).inner)
        return cls(ranks, rows_stay=plan.tp_mode != "3d")


def counts_heads(module: nn.Module) -> bool:
    """Return whether the module itself keeps a count of heads."""
    return any(_is_count(vars(module).get(name)) for name in HEADS)


def find_heads(
    homes: Sequence[nn.Module], *, around: Sequence[nn.Module], firsts: Sequence[int], features: int
) -> AttentionHeads | None:
    """Return the heads of a branch: its colwise matrices write `firsts` features, its rowwise one reads `features`.

    The first module that counts heads decides: one of `homes`, which hold the matrices, then one `around` them. Return
    None when the sizes do not fit an attention with these heads.
    """
    for module in (*homes, *around):
        own, read = vars(module), _numbers(module)
        sources = {"": own, **{name: _fields(own.get(name)) for name in CONFIGURATIONS}}
        for holder, source in sources.items():
            sure = module in homes and (not holder or any(f"{holder}.{name}" in read for name in HEADS))
            count = _count(source, HEADS)
            if not count or features % count:
                continue
            width = next((found for each in (source, *sources.values()) if (found := _count(each, HEAD_WIDTHS))), 0)
            keys = next((found for each in (source, *sources.values()) if (found := _key_count(each))), count)
            width = width or features // count
            for key_count in dict.fromkeys((keys, count, *_equal_pair(firsts, width=width))):
                if count % key_count == 0:
                    heads = AttentionHeads(count, key_count, width)
                    if heads.features == features and _fits(heads, firsts, sure=sure):
                        return heads
    return None


def order_of_fused(owner: nn.Module, *, child: str, sizes: Sequence[int], width: int) -> str | None:
    """Return the order of the features of a fused matrix: "sections" (all of q, then k, then v), "interleaved" (head by
    head) or None if unknown.

    The order follows from a known class, from section sizes (in features or in heads) that the module keeps as a tuple,
    or from the use of the output: `self.qkv(x).split(...)`, `.chunk(3, ...)`, `.view(..., 3, heads, width)`, `[...,
    :size]`.
    """
    for kind in type(owner).__mro__:
        if INTERLEAVED.get(full_name(kind)) == child:
            return "interleaved"
    kept = [tuple(value) for value in vars(owner).values() if isinstance(value, tuple | list)]
    if tuple(sizes) in kept or tuple(size // width for size in sizes) in kept:
        return "sections"
    return "sections" if child in set(_split_children(type(owner))) else None


def sections_of(matrix: MatrixModule, *, heads: AttentionHeads) -> tuple[int, ...]:
    """Return the sizes of the sections that a colwise matrix of an attention writes, if they follow each other."""
    keys = heads.keys
    fused = {heads.features + 2 * keys: (heads.features, keys, keys), heads.features: (heads.features,), keys: (keys,)}
    return fused.get(matrix.outputs, (keys,) * (matrix.outputs // keys))


def cut_by_rule(
    matrix: MatrixModule, *, sections: tuple[int, ...], given: Mapping[str, int], default: int
) -> tuple[tuple[int, ...], int]:
    """Return the sections and the grain that a rule states. Raises ValueError when they do not fit the matrix."""
    number, grain = given.get("sections", 1), given.get("grain", default)
    sizes = sections if len(sections) == number else (matrix.outputs // number,) * number
    if sum(sizes) != matrix.outputs or any(size % grain for size in sizes):
        raise ValueError(
            f"{matrix}: a rule cuts it into sections={number} with grain={grain}, which does not divide it"
        )
    return (sizes if number > 1 else ()), grain


def counts_of_queries(module: nn.Module, *, heads: AttentionHeads, group: int) -> tuple[tuple[str, int], ...]:
    """Return the attributes of a module that count query heads or their features, each with how many stay together.

    `group` query heads stay together. An attribute of a configuration that the forward reads is "config.num_heads".
    """
    found = []
    for name, value in _numbers(module).items():
        numbers = value if isinstance(value, tuple) else (value,)
        grains = [_grain(name.rpartition(".")[2], number, heads, group) for number in numbers]
        if grains and all(grains):
            found.append((name, min(grains)))
    return tuple(found)


def counts_of_keys(module: nn.Module, *, heads: AttentionHeads) -> tuple[str, ...]:
    """Return the attributes of a module that count key heads."""
    found = _numbers(module).items()
    return tuple(name for name, value in found if name.rpartition(".")[2] in KEY_HEADS and value == heads.key_count)


def counts_of_groups(module: nn.Module, *, heads: AttentionHeads) -> tuple[str, ...]:
    """Return the attributes of a module that count the query heads of one key head."""
    found = _numbers(module).items()
    return tuple(name for name, value in found if name.rpartition(".")[2] in GROUPS and value == heads.group)


def set_count(module: nn.Module, *, attribute: str, count: Any) -> None:
    """Set an attribute of a module to `count`. If it is in a configuration, the module gets a copy of that."""
    holder, _, name = attribute.rpartition(".")
    owner: Any = module
    if holder:
        owner = copy.copy(getattr(module, holder))
        setattr(module, holder, owner)
    setattr(owner, name, count)


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the numbers among a module's attributes, and those its forward reads as `config.name`."""
    own = vars(module)
    read = [path for path in dotted_names(type(module)) if len(path) == 2 and path[0] in CONFIGURATIONS]
    return {**own, **{f"{holder}.{name}": _fields(own.get(holder)).get(name) for holder, name in sorted(read)}}


def _grain(name: str, number: Any, heads: AttentionHeads, group: int) -> int:
    """Return how many of the heads or features that `number` counts stay together; 0 when it counts something else."""
    if type(number) is not int:
        return 0
    if name in HEADS and number == heads.count:
        return group
    if name in HEADS and number == heads.key_count:
        return 1
    return group * heads.width if name in FEATURES and number == heads.features else 0


def _fields(configuration: Any) -> Mapping[str, Any]:
    """Return the fields of a configuration, whether it is a mapping or an object."""
    if isinstance(configuration, Mapping):
        return configuration
    return vars(configuration) if isinstance(getattr(configuration, "__dict__", None), dict) else {}


def _is_count(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_count(entry) for entry in value)
    return type(value) is int and value > 0


def _count(source: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first count under one of the names, or of a tuple (heads, key_heads, key_heads) its first number."""
    for name in names:
        value = source.get(name)
        if isinstance(value, tuple | int) and _is_count(value):
            return int(value[0] if isinstance(value, tuple) else value)
    return 0


def _key_count(source: Mapping[str, Any]) -> int:
    for name in HEADS:
        value = source.get(name)
        if isinstance(value, tuple) and _is_count(value):
            return int(value[-1])
    return _count(source, KEY_HEADS)


def _equal_pair(firsts: Sequence[int], *, width: int) -> list[int]:
    """Return the key heads of three matrices if two are equal and smaller, k and v."""
    smaller = sorted(firsts)[:2]
    return [smaller[0] // width] if len(firsts) == 3 and smaller[0] == smaller[1] >= width else []


def _fits(heads: AttentionHeads, firsts: Sequence[int], *, sure: bool) -> bool:
    """Return whether matrices of these sizes are the q, k and v of these heads.

    The two matrices of a gated MLP may add up to the same size. So fewer than three matrices must add up to three times
    the features, unless the heads are `sure`.
    """
    adds_up = sum(firsts) == heads.features + 2 * heads.keys
    return adds_up and (sure or len(firsts) >= 3 or sum(firsts) == 3 * heads.features)


def _split_children(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of children whose output a forward splits, in the same expression or by a name it gave it."""
    try:
        tree = source_of(inspect.unwrap(kind.forward))
    except (OSError, SyntaxError, TypeError):
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Call | ast.Subscript)]
    given: dict[str, str | None] = {}
    for node in sorted(nodes, key=_order_key):
        if isinstance(node, ast.Assign):
            child = _child_behind(node.value, given)
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            given |= {name: child if isinstance(node.targets[0], ast.Name) else None for name in names}
        elif (source := _split_expression(node)) and (child := _child_behind(source, given)):
            yield child


def _order_key(node: ast.Assign | ast.Call | ast.Subscript) -> tuple[int, int, bool]:
    """Return a sort key of a statement's place in a forward without branches; an assignment comes after its value."""
    return node.end_lineno or 0, node.end_col_offset or 0, isinstance(node, ast.Assign)


def _child_behind(node: ast.expr, given: Mapping[str, str | None]) -> str | None:
    """Return NAME of an expression `self.NAME(...)`, also behind a variable or a conversion, or None."""
    if isinstance(node, ast.Name):
        return given.get(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
        return node.func.attr
    return _child_behind(node.func.value, given) if node.func.attr in _KEEPS_ORDER else None


def _split_expression(node: ast.Call | ast.Subscript) -> ast.expr | None:
    """Return the expression that is split into sections or heads, by `.split`, `.chunk`, a view or `[..., start:stop]`,
    or None.
    """
    if isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        of_features = len(index) == 2 and isinstance(index[0], ast.Constant) and index[0].value is Ellipsis
        return node.value if of_features and isinstance(index[1], ast.Slice) and index[1].step is None else None
    if not isinstance(node.func, ast.Attribute):
        return None
    last = node.args[-3:]
    three = len(last) == 3 and isinstance(last[0], ast.Constant) and last[0].value == 3
    apart = node.func.attr in ("split", "chunk") or (node.func.attr in ("view", "reshape") and three)
    return node.func.value if apart else None
