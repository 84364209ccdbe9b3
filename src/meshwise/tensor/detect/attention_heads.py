"""Find the heads of an attention: their number, their width, and the attributes that count them.

Every rank gets whole heads. So the split needs three facts: the features of a matrix that stay together (the grain),
the order of q, k and v in a fused matrix, and the attributes that count heads. These attributes are set to the
rank's counts. So a forward with `q.view(batch, -1, self.num_heads, self.head_width)` works on the heads of its rank.

All queries of one KV head stay together, and the input of the output matrix is split like the queries.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) is found by the names of its matrices:

    | hidden ─┬─ q_proj, or q_a_proj ── norm ── q_b_proj ─────────── heads of q ─┐
    |         └─ kv_a_proj_with_mqa ─┬─ latent ── norm ── kv_b_proj ─ heads of k, v ─┼─ attention ── o_proj ── hidden
    |                                └─ rotary key (k_pe) ───────── for every head ─┘

Matrices that output heads are split by heads, as is the input of `o_proj`. Earlier modules run whole on every rank.
The rotary key is used by the heads of every rank, so its gradient is summed over the ranks (`summed_from`)."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwise.model.parameter_units import dotted_names
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.detect.attention_names import (
    CONFIGURATIONS,
    FEATURES,
    HEAD_WIDTHS,
    HEADS,
    KEY_HEADS,
)
from meshwise.tensor.detect.layer_formulas import MatrixModule, as_matrix, as_norm
from meshwise.tensor.tp_schemes import scheme


@dataclass(frozen=True)
class AttentionHeads:
    """Numbers of query heads (`count`) and of KV heads of one attention, and features of a head of queries or keys
    (`width`) and of values."""

    count: int
    key_count: int
    width: int
    value_width: int

    @property
    def features(self) -> int:
        """Features of all query heads."""
        return self.count * self.width

    @property
    def kv_features(self) -> tuple[int, int]:
        """Features of the keys, and of the values, of all KV heads."""
        return self.key_count * self.width, self.key_count * self.value_width

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.count // self.key_count

    def kv_replicas(self, degree: int) -> int:
        """Return how many of `degree` ranks hold the same KV head; 0 if KV heads cannot be replicated evenly."""
        if self.key_count >= degree:
            return 1
        ranks, left = divmod(degree, self.key_count)
        return 0 if left or self.group % ranks else ranks


def head_degree(plan: Plan) -> int:
    """Return the number of ranks that split an attention's heads. Raises ValueError for a plan with `dp=auto`."""
    mesh = plan.mesh()
    return math.prod(mesh.degree(axis) for axis in scheme(plan, blocks=True).inner)


def counts_heads(module: nn.Module) -> bool:
    """Return whether the module itself has an attribute with one of the names HEADS that is a count."""
    return any(_is_count(vars(module).get(name)) for name in HEADS)


def find_heads(
    owners: Sequence[nn.Module], *, around: Sequence[nn.Module], outputs: Sequence[int], features: int
) -> AttentionHeads | None:
    """Return the heads of a group of matrices, or None if the matrices do not look like an attention.

    `owners`: the modules that hold the matrices. `around`: the modules that enclose the first of them. `outputs`: the
    output features of each colwise matrix. `features`: the input features of the rowwise matrix. Counts of heads are
    read from the attributes and configurations of `owners`, then of `around`; the first that fits the sizes wins."""
    for module in (*owners, *around):
        own, read = vars(module), _numbers(module)
        sources = {"": own, **{name: _fields(own.get(name)) for name in CONFIGURATIONS}}
        for holder, source in sources.items():
            sure = module in owners and (not holder or any(f"{holder}.{name}" in read for name in HEADS))
            count = _count(source, HEADS)
            if not count or features % count:
                continue
            widths = [_count(each, HEAD_WIDTHS) for each in sources.values()]
            width = next(filter(None, widths), features // count)
            keys = next(filter(None, map(_key_count, sources.values())), count)
            shown = [size // width for size in outputs] if len(outputs) >= 3 else []
            for key_count in filter(None, dict.fromkeys((keys, count, *shown))):
                heads = AttentionHeads(count, key_count, width, value_width=features // count)
                if count % key_count == 0 and _fits(heads, outputs, sure=sure):
                    return heads
    return None


def sections_of(matrix: MatrixModule, *, heads: AttentionHeads, separate: bool) -> tuple[int, ...]:
    """Return the sizes of q, k and v (the sections) in the output of a colwise matrix that holds them in turn.

    `separate`: True if q, k and v have a matrix each; then q may have a section for a gate. An output of another size
    is taken as several sections of the size of k."""
    q, (k, v) = heads.features, heads.kv_features
    whole = {q, k, v, heads.count, heads.count * heads.value_width} if separate else {q, k}
    fused = {2 * q: (q, q)} if separate else {q + k + v: (q, k, v)}
    one = (matrix.outputs,)
    return one if matrix.outputs in whole else fused.get(matrix.outputs, (k,) * (matrix.outputs // k) or one)


def cut_by_rule(
    matrix: MatrixModule, *, sections: tuple[int, ...], given: Mapping[str, int], default: int
) -> tuple[tuple[int, ...], int]:
    """Return the sections (() for one section) and the grain, in features, that a rule states for a matrix.

    `given`: options of the rule. `sections`: sizes from the structure, used if the rule states as many sections;
    otherwise sections are equal. `default`: the grain if the rule states none. Raises ValueError for unfit sizes."""
    number, grain = given.get("sections", 1), given.get("grain", default)
    sizes = sections if len(sections) == number else (matrix.outputs // number,) * number
    if sum(sizes) != matrix.outputs or any(size % grain for size in sizes):
        raise ValueError(
            f"{matrix}: sections={number} grain={grain} in its rule does not divide it; choose numbers that divide it"
        )
    return (sizes if number > 1 else ()), grain


def counts_of_queries(module: nn.Module, *, heads: AttentionHeads, group: int) -> tuple[tuple[str, int], ...]:
    """Return the attributes that count heads or the queries' features, each with the number that stays on one rank.

    `group`: query heads that stay on one rank. An attribute of a configuration is written as "config.num_heads"; it is
    returned only if the forward reads it."""
    found = []
    for name, value in _numbers(module).items():
        numbers = value if isinstance(value, tuple) else (value,)
        grains = [_grain(name.rpartition(".")[2], number, heads, group) for number in numbers]
        if grains and all(grains):
            found.append((name, min(grains)))
    return tuple(found)


def attributes_equal_to(module: nn.Module, *, names: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the attributes, and configuration fields that the forward reads, in `names` that equal `number`."""
    found = _numbers(module).items()
    return tuple(name for name, value in found if name.rpartition(".")[2] in names and value == number)


def set_count(module: nn.Module, *, attribute: str, count: Any) -> None:
    """Set `attribute` of a module to `count`. For "config.NAME", the module first gets a copy of `config`."""
    holder, _, name = attribute.rpartition(".")
    owner: Any = module
    if holder:
        owner = copy.copy(getattr(module, holder))
        setattr(module, holder, owner)
    setattr(owner, name, count)


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes by name, and the configuration fields that it reads as "config.NAME"."""
    own = vars(module)
    read = [path for path in dotted_names(type(module)) if len(path) == 2 and path[0] in CONFIGURATIONS]
    return {**own, **{f"{holder}.{name}": _fields(own.get(holder)).get(name) for holder, name in sorted(read)}}


def _grain(name: str, number: Any, heads: AttentionHeads, group: int) -> int:
    """Return how many heads (or features of heads) stay together, if `number` counts them; else 0, as for KV heads."""
    if type(number) is not int or (name in KEY_HEADS and number == heads.key_count):
        return 0
    if name in HEADS and number == heads.count:
        return group
    if name in HEADS and number == heads.key_count:
        return 1
    return group * heads.width if name in FEATURES and number == heads.features else 0


def _fields(configuration: Any) -> Mapping[str, Any]:
    """Return the fields of a configuration, a mapping or an object, by name; none for anything else."""
    if isinstance(configuration, Mapping):
        return configuration
    return vars(configuration) if isinstance(getattr(configuration, "__dict__", None), dict) else {}


def _is_count(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_count(entry) for entry in value)
    return type(value) is int and value > 0


def _count(source: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first count under one of `names`, or 0; of a tuple (heads, key_heads, key_heads) its first number."""
    counts = [value for name in names if isinstance(value := source.get(name), tuple | int) and _is_count(value)]
    return next((int(value[0] if isinstance(value, tuple) else value) for value in counts), 0)


def _key_count(source: Mapping[str, Any]) -> int:
    counts = [value for name in HEADS if isinstance(value := source.get(name), tuple) and _is_count(value)]
    return int(counts[0][-1]) if counts else _count(source, KEY_HEADS)


def _fits(heads: AttentionHeads, outputs: Sequence[int], *, sure: bool) -> bool:
    """Return whether matrices with `outputs` output features can be the q, k and v of these heads, and gates.

    A gate has a number for each feature of the output, or for each head. The matrix of q may contain a gate too. A
    gated MLP's two matrices may add up to q, k and v by chance. So fewer than three must add up to
    3 · heads.features. `sure` (their own module counts heads) skips this test."""
    q, (k, v) = heads.features, heads.kv_features
    if len(outputs) < 3:
        return sum(outputs) == q + k + v and k == v and (sure or sum(outputs) == 3 * q)
    gates = {heads.count, heads.count * heads.value_width}
    return any(
        not Counter((first, k, v)) - Counter(outputs) and set(Counter(outputs) - Counter((first, k, v))) <= gates
        for first in (q, 2 * q)
    )


_LATENT = "kv_a_proj_with_mqa"


def latent_attentions(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the multi-head latent attentions of a model, by name."""
    return {
        name: each
        for name, each in module.named_modules()
        if all(isinstance(each._modules.get(key), nn.Linear) for key in (_LATENT, "kv_b_proj", "o_proj"))
        and _heads(each)
    }


def latent_parts(attention: nn.Module, *, name: str, plan: Plan, declared: Mapping[str, str]) -> Mapping[str, Part]:
    """Return the roles (`Part`) of a multi-head latent attention called `name` and of its modules.

    `declared`: roles that the model declares, by module name. Raises PlanError if the plan has more ranks than the
    attention has heads, splits tokens, or is not `tp_mode=1d`."""
    heads = _heads(attention)
    if plan.tp_mode != "1d" or plan.sequence_parallel:
        raise PlanError(
            f"{name} ({type(attention).__name__}) makes queries, keys and values from latents; '{plan}' cannot split "
            "it. Nearest that works: 'tp_mode=1d sequence_parallel=0'"
        )
    if heads < plan.tp:
        raise PlanError(
            f"{name} has {heads} heads, and '{plan}' splits them over {plan.tp} ranks. Nearest that works: 'tp={heads}'"
        )
    output: Any = attention.get_submodule("o_proj")
    gates = [(output.out_features, size) for size in (heads, output.in_features)]
    parts, by_head = {}, [attention.named_parameters(prefix=name, recurse=False)]
    for key, child in attention.named_children():
        below, matrix = f"{name}.{key}", as_matrix(child, name=key)
        known = key in ("q_proj", "q_b_proj", "kv_b_proj") or declared.get(below) == "colwise"
        if matrix and key == "o_proj":
            parts[below] = Part("rowwise", grain=matrix.inputs // heads)
        elif matrix and (known or (matrix.inputs, matrix.outputs) in gates):
            parts[below] = Part("colwise", grain=matrix.outputs // heads)
        elif all(parameter.shape == (heads,) for parameter in child.parameters()) and not as_norm(child):
            by_head.append(child.named_parameters(prefix=below))
        else:
            parts[below] = Part("whole", summed_from=vars(attention)["kv_lora_rank"] if key == _LATENT else None)
    parts |= {key: Part("inner") for key, parameter in itertools.chain(*by_head) if parameter.shape == (heads,)}
    counts = tuple((key, 1) for key in (*HEADS, *KEY_HEADS) if vars(attention).get(key) == heads)
    return {**parts, name: Part("attention", counts=counts, heads=heads)}


def _heads(attention: nn.Module) -> int:
    """Return the number of heads, or 0 if no attribute shows it or the matrices do not fit it."""
    own = vars(attention)
    heads = next((own[key] for key in HEADS if type(own.get(key)) is int), 0)
    if not heads or type(own.get("kv_lora_rank")) is not int:
        return 0
    sizes = [attention.get_submodule("kv_b_proj").out_features, attention.get_submodule("o_proj").in_features]
    return 0 if any(size % heads for size in sizes) else heads  # type: ignore[operator]
