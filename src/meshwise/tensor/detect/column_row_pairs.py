"""Find the pairs of colwise and rowwise matrices in a block, and give a part to each module of a pair.

A transformer block adds the outputs of branches (attention, MLP) to hidden states of one width:

    hidden states ──┬── colwise ──┬── (heads, activation: between the two nothing mixes features) ── rowwise ──┬── +
                    └── colwise ──┘                                                                            │
    hidden states ─────────────────────────────────────────────────────────────────────────────────────────────┘

`BranchFinder` finds branches. A rowwise matrix writes the width of the hidden states, a colwise matrix another size. A
square matrix can be either. The forward shows the role if all squares but one read no matrix (`read_outputs`). Else the
registration order shows where a branch ends:

    | a matrix that is rowwise by its sizes              expansion 8x32, projection 32x8
    | a square after a matrix that is colwise by size    qkv 8x24, output 8x8
    | the fourth of four squares, in attention           q, k, v, output
    | the second of two squares, otherwise               an MLP whose hidden size is the width

A branch may begin in one module (q, k, v) and end in the next (output). If all matrices of a module are its own, and
one is rowwise, their order does not matter. Stated roles take precedence over sizes.

`ColumnRowPairs` gives a part to each module of a branch. The modules between the matrices are norms over all of their
features, hold one number per head, or treat all heads equally (`_parts_between`)."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TypeAlias

from torch import nn

from meshwise.base.batch_norm_classes import BatchNorm
from meshwise.plan import Plan
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.sharded_layers import ShardedMultiheadAttention
from meshwise.tensor.detect.attention_heads import (
    AttentionHeads,
    attributes_equal_to,
    counts_heads,
    counts_of_queries,
    cut_by_rule,
    find_heads,
    head_degree,
    sections_of,
)
from meshwise.tensor.detect.attention_names import (
    BY_HEAD,
    GROUPS,
    HEADS,
    KEY_HEADS,
    MASKS,
    enclosing,
)
from meshwise.tensor.detect.forward_source import read_outputs
from meshwise.tensor.detect.layer_formulas import MatrixModule, as_matrix, as_norm, matrices
from meshwise.tensor.split_trial import SplitTrials

_Q_OR_K = re.compile(r"(^|_)(q|k|query|key)(_|$)")
"""Names of norms of queries and keys, where the forward does not show what they read."""
_SQUARES_OF_ATTENTION = 4
_SQUARES_OF_MLP = 2


@dataclass(frozen=True)
class BlockBranch:
    """Matrices of one attention or MLP: `colwise` matrices read the hidden states, the `rowwise` matrix writes them."""

    colwise: tuple[MatrixModule, ...]
    rowwise: MatrixModule

    @property
    def looks_like_attention(self) -> bool:
        """True for three or more colwise matrices, or one with three times as many outputs as `rowwise` has inputs."""
        writes = [matrix.outputs for matrix in self.colwise]
        return len(writes) >= 3 or (len(writes) == 1 and writes[0] == 3 * self.rowwise.inputs)


def hidden_width(blocks: Iterable[nn.Module], *, outside: Collection[int]) -> int | None:
    """Return the width of the hidden states: the size that the most matrices of the blocks read or write.

    Only sizes that some matrix reads and some matrix writes count. Among equally frequent sizes, one in `outside` (last
    dims of parameters outside of the blocks) wins, then the one read first. None if there is no such size. Blocks of
    two matrices that map one size to another have the width of their outputs."""
    pairs: list[tuple[int, int]] = []
    for block in blocks:
        found = [(matrix.inputs, matrix.outputs) for matrix in matrices(block, name="")]
        match found:
            case [(first, inner), (again, last)] if inner == again and first != last:
                return last
        widths = [module.embed_dim for module in block.modules() if isinstance(module, nn.MultiheadAttention)]
        pairs += found + [(width, width) for width in widths for _ in range(2)]
    uses = Counter(size for pair in pairs for size in {*pair})
    read = [size for size, _ in pairs if any(size == written for _, written in pairs)]
    return max(read, key=lambda size: (uses[size], size in outside), default=None)


@dataclass(frozen=True)
class BranchItem:
    """Matrix, its role ("" if its sizes leave it open), and `in_attention`: True if an attention holds it."""

    matrix: MatrixModule
    role: str
    in_attention: bool


@dataclass(frozen=True)
class BranchFinder:
    """Finder of the branches in the blocks of a model, from sizes and stated roles."""

    width: int
    declared: Mapping[str, str]
    """Roles by module name that the user or the model states. "colwise" and "rowwise" are for matrices; any other role
    keeps a matrix out of branches. Other modules may be "attention" or "whole"."""
    names: Collection[str]
    """First name of each module of the model. A module with several names is read under this name only."""

    def branches(self, module: nn.Module, *, name: str) -> tuple[list[BlockBranch], list[BranchItem]]:
        """Return the branches that end inside a module called `name`, and the matrices of an unfinished branch."""
        found: list[BlockBranch] = []
        left: list[BranchItem] = []
        within = f"{name}." if name else ""
        children = {key: child for key, child in module.named_children() if within + key in self.names}
        for key, child in [*children.items()]:
            if isinstance(child, nn.MultiheadAttention) or self.declared.get(within + key) == "whole":
                del children[key]  # this attention holds its own matrices
        own = self._own_items(module, children, within=within)
        items = sorted(own.values(), key=lambda item: item.role == "rowwise")
        alone = all("." not in matrix.name for matrix in matrices(module, name=""))
        if alone and len(items) > 1 and [item.role for item in items] == ["colwise"] * (len(items) - 1) + ["rowwise"]:
            return [_branch(items)], []
        for key, child in children.items():
            items = [own[key]] if key in own else []
            if as_matrix(child, name=key) is None:
                inside, items = self.branches(child, name=within + key)
                found += inside
            for item in items:
                if item.role == "colwise" and _ends(left):
                    found.append(_branch(left))
                    left = []
                left.append(item)
                if item.role == "rowwise" and len(left) > 1:
                    found.append(_branch(left))
                    left = []
        return ([*found, _branch(left)], []) if _ends(left) else (found, left)

    def _own_items(self, module: nn.Module, children: Mapping[str, nn.Module], *, within: str) -> dict[str, BranchItem]:
        """Return the matrices among a module's children that may be in branches, by own name."""
        found = {key: matrix for key, child in children.items() if (matrix := as_matrix(child, name=within + key))}
        roles = {key: self._role(matrix) for key, matrix in found.items()}
        read = {key: outputs for key, outputs in read_outputs(module).items() if roles.get(key) == ""}
        reads = {key: not outputs & found.keys() for key, outputs in read.items()}
        squares, called = [key for key, role in roles.items() if role == ""], [*reads]
        # the last one called writes hidden states, if all squares before it are called
        sure = len(called) > 1 and reads.keys() >= {*squares[: squares.index(called[-1])]}
        if sure and [*reads.values()] == [True] * (len(called) - 1) + [False]:
            roles |= {key: "colwise" if given else "rowwise" for key, given in reads.items()}
        heads = counts_heads(module) or self.declared.get(within[:-1]) == "attention"
        known = [key for key in found if roles[key] in ("colwise", "rowwise", "")]
        return {key: BranchItem(found[key], roles[key], heads) for key in known}

    def _role(self, matrix: MatrixModule) -> str:
        if matrix.name in self.declared:
            return self.declared[matrix.name]
        if matrix.inputs == matrix.outputs == self.width:
            return ""
        return "rowwise" if matrix.outputs == self.width else "colwise"


def _ends(items: Sequence[BranchItem]) -> bool:
    """Return whether these matrices are a branch that ends with the last one, a square matrix."""
    if not items or items[-1].role or any(item.role == "rowwise" for item in items):
        return False
    if any(item.role == "colwise" for item in items):
        return True
    attention = any(item.in_attention for item in items)
    return len(items) == (_SQUARES_OF_ATTENTION if attention else _SQUARES_OF_MLP)


def _is_gate(matrix: MatrixModule) -> bool:
    return bool({"g", "gate"} & set(matrix.own_name.split("_")))


def _branch(items: Sequence[BranchItem]) -> BlockBranch:
    *colwise, rowwise = (item.matrix for item in items)
    return BlockBranch(tuple(colwise), rowwise)


Cut: TypeAlias = tuple[tuple[int, ...], int]
"""Sections and grain of a colwise matrix."""
_GATED = 2
"""Largest output of an MLP matrix, as a multiple of the input of the next matrix: a gate and a value."""


@dataclass(frozen=True)
class FoundAttention:
    """Attention in a model: `name` is the module that holds its first matrix."""

    name: str
    heads: AttentionHeads

    cut_as_one: bool
    """True if q, k and v are split equally, as in a fused matrix; then no two ranks hold the same KV head."""
    tried: bool = True
    """False if no trial could show that the forward reads no sizes of a rank's part of its input."""

    def fits(self, *, ranks: int, plan: Plan) -> bool:
        """Return whether the ranks can split the heads: each gets whole KV heads, with all or some of their queries."""
        keys = self.heads.key_count
        if keys >= ranks:
            return keys % ranks == 0 or not (self.cut_as_one and self.heads.group > 1)
        return plan.tp_mode != "3d" and not self.cut_as_one and self.heads.kv_replicas(ranks) > 0


def _ways_to_share(found: Mapping[str, Part], home: str, branch: BlockBranch) -> Sequence[Mapping[str, Part]]:
    """Return the parts to try for the input of an attention: each matrix gathers it, or the attention at its entry.

    A third way also gives the forward as many features as the rank has heads. Under 3d rows inside a pair differ from
    rows outside, so each matrix gathers; `even_rows` is tried last."""
    own, width = found[home], branch.colwise[0].inputs
    if own.even_rows:
        return [{home: replace(own, even_rows=False)}, {}]
    if any(one.parent_name != home for one in branch.colwise):
        return [{}]
    inside = [one.name for one in branch.colwise if not found[one.name].whole_tokens]
    gathered = {name: replace(found[name], gathered=True) for name in inside}
    narrow = {home: replace(own, narrow_grain=own.grain * (width // own.heads))}
    return [{}, gathered, {**gathered, **narrow}][: 2 + (width % own.heads == 0)]


@dataclass(frozen=True)
class ColumnRowPairs:
    """Finder of the parts of all pairs of a model; also collects the model's attentions.

    | modules    the model's modules by name
    | options    the options of rules, such as heads=8, by module name
    | plan       the plan, whose ranks share the heads
    | trials     the trials under this plan
    | reasons    mapping to which a text is added, by name, for each module that gets no role
    | attentions the attentions found so far"""

    modules: Mapping[str, nn.Module]
    options: Mapping[str, Mapping[str, int]]
    reasons: dict[str, str]
    plan: Plan
    trials: SplitTrials
    attentions: list[FoundAttention] = field(default_factory=list)

    def parts(self, branches: Iterable[BlockBranch], *, block: str) -> dict[str, Part]:
        """Return the parts of the branches of the block called `block`, by module name.

        Any attention after the first in a block counts as cross-attention: its keys come from outside of the blocks."""
        found: dict[str, Part] = {}
        before = 0
        for branch in branches:
            heads = self._heads(branch, block=block)
            if heads is not None:
                found |= self._attention(branch, heads, cross=before > 0)
                before += 1
            elif branch.looks_like_attention:
                home = branch.colwise[0].parent_name
                why = f"it looks like an attention, but {home or 'the model'} counts no heads that fit"
                why += "; state the number of heads by 'attention heads=…'"
                if len(branch.colwise) > 3 and counts_heads(self.modules[home]):
                    why = "it looks like an attention with more matrices than q, k and v"
                self.reasons.update({matrix.name: why for matrix in (*branch.colwise, branch.rowwise)})
            else:
                found |= self._mlp(branch)
        return found

    def _heads(self, branch: BlockBranch, *, block: str) -> AttentionHeads | None:
        homes = list(dict.fromkeys(matrix.parent_name for matrix in (*branch.colwise, branch.rowwise)))
        around = [name for name in enclosing(homes[0]) if name == block or name.startswith(f"{block}.") or not block]
        features = branch.rowwise.inputs
        for name in (*homes, *around):
            given = self.options.get(name, {})
            if "heads" in given:
                count, keys = given["heads"], given.get("kv_heads", given["heads"])
                if features % count or count % keys:
                    raise ValueError(
                        f"{name}: heads={count} kv_heads={keys}, but {branch.rowwise} reads {features} features; heads "
                        "has to divide them, and kv_heads the heads"
                    )
                heads = AttentionHeads(count, keys, features // count, features // count)
                for matrix in branch.colwise:
                    if matrix.outputs < heads.kv_features[0]:
                        raise ValueError(
                            f"{name}: heads={count} kv_heads={keys} are {heads.kv_features[0]} features of keys, but "
                            f"{matrix} writes only {matrix.outputs}; state fewer kv_heads"
                        )
                return heads
        if sum(not _is_gate(one) for one in branch.colwise) > 3:
            return None
        modules = [self.modules[name] for name in homes]
        outputs = [matrix.outputs for matrix in branch.colwise]
        return find_heads(modules, around=[self.modules[n] for n in around], outputs=outputs, features=features)

    def _attention(self, branch: BlockBranch, heads: AttentionHeads, *, cross: bool) -> dict[str, Part]:
        home, closing = branch.colwise[0].parent_name, branch.rowwise
        owner = self.modules[home]
        cut_as_one = len(branch.colwise) < 3 or any(isinstance(vars(owner).get(name), tuple) for name in HEADS)
        kv_replicas = 1 if cut_as_one or self.plan.tp_mode == "3d" else heads.kv_replicas(head_degree(self.plan)) or 1
        group = 1 if cut_as_one else heads.group // kv_replicas
        cuts: dict[str, Sequence[Cut]] = {}
        outside = [matrix for matrix in branch.colwise if cross and "q" not in matrix.own_name.lower()]
        found = {
            home: Part(
                "attention",
                counts=counts_of_queries(owner, heads=heads, group=group),
                key_counts=attributes_equal_to(owner, names=KEY_HEADS, number=heads.key_count),
                group_counts=attributes_equal_to(owner, names=GROUPS, number=heads.group),
                kv_replicas=kv_replicas,
                even_rows=self.plan.tp_mode == "3d",
                by_head=tuple(
                    n for n in signature(owner.forward).parameters if n in BY_HEAD or any(word in n for word in MASKS)
                ),
                heads=heads.count,
                grain=group,
            ),
            closing.name: Part("rowwise", grain=group * heads.value_width, transposed=closing.weight_is_transposed),
        }
        separate, shared = len(branch.colwise) >= 3, heads.kv_features if heads.group > 1 else ()
        of_keys = [one for one in branch.colwise if separate and one.outputs in shared and not _is_gate(one)][:2]
        for matrix in branch.colwise:
            keys, sections = matrix in of_keys, sections_of(matrix, heads=heads, separate=separate)
            each = sections[0] // (heads.key_count if keys else heads.count // group) if separate else heads.width
            cuts[matrix.name] = self._cuts(matrix, sections, grain=each, heads=heads)
            found[matrix.name] = Part(
                "colwise",
                transposed=matrix.weight_is_transposed,
                whole_tokens=matrix in outside,
                readers=len(outside) if matrix in outside else len(branch.colwise) - len(outside),
                shared=keys and kv_replicas > 1,
            )
        found |= self._parts_between(branch, heads=heads, group=group, shared=kv_replicas > 1)
        attention = FoundAttention(home, heads, cut_as_one=cut_as_one)
        if attention.fits(ranks=head_degree(self.plan), plan=self.plan):
            ways = _ways_to_share(found, home, branch)
            found, tried = self._tried(home, found, cuts=cuts, ways=ways)
            attention = replace(attention, tried=tried)
        self.attentions.append(attention)
        return found

    def _tried(
        self,
        home: str,
        found: dict[str, Part],
        *,
        cuts: Mapping[str, Sequence[Cut]],
        ways: Sequence[Mapping[str, Part]],
    ) -> tuple[dict[str, Part], bool]:
        """Return the first parts with which the module `home` computes the same in a trial, and whether a trial ran.

        `cuts`: for each matrix, sections and grain to try. `ways`: parts to try in place of those in `found`. Without a
        right one, return `found` with the first cuts and without matrices that have several, and note the reason."""
        for chosen in itertools.product(*cuts.values()):
            for way in ways:
                parts = {**found, **way}
                parts |= {
                    name: replace(parts[name], sections=s, grain=g) for name, (s, g) in zip(cuts, chosen, strict=True)
                }
                error = self.trials.error(self.modules[home], name=home, parts=parts)
                if error == "":
                    return parts, True
        for name, several in cuts.items():
            found[name] = replace(found[name], sections=several[0][0], grain=several[0][1])
            if len(several) > 1:
                del found[name]
                (sections, _), (_, grain) = several
                self.reasons[name] = (
                    f"it looks like {len(sections)} fused matrices, in an order that a trial did not find; "
                    f"'colwise sections={len(sections)}' if they follow each other, 'colwise grain={grain}' if they do "
                    "so in each head"
                )
        return found, error is not None

    def _parts_between(
        self, branch: BlockBranch, *, heads: AttentionHeads, group: int, shared: bool
    ) -> dict[str, Part]:
        """Return the parts of the norms, tables and parameters in the attention of a branch, by name.

        `group`: query heads that stay on one rank. `shared`: True if several ranks hold the same KV head."""
        name, widths = branch.colwise[0].parent_name, (heads.width, heads.value_width)
        owner, between = self.modules[name], self._between(branch)
        grains = {heads.kv_features[0]: heads.width, heads.features: group * heads.width}
        grains[branch.rowwise.inputs] = group * heads.value_width
        found: dict[str, Part] = {}
        for inner_name, module in owner.named_modules(prefix=name):
            if isinstance(module, nn.Embedding) and module.embedding_dim == heads.count:
                found[inner_name] = Part("inner", grain=group)
            elif norm := as_norm(module):
                if norm[0] in widths:
                    found[inner_name] = Part("each_head")
                elif norm[0] in grains and (inner_name in between or _Q_OR_K.search(inner_name.rpartition(".")[2])):
                    own_keys = shared and norm[0] < heads.features
                    found[inner_name] = Part("norm", norm=norm[1], inner=True, grain=grains[norm[0]], shared=own_keys)
        for inner_name, parameter in owner.named_parameters(recurse=False, prefix=name):
            dims = [dim for dim, size in enumerate(parameter.shape) if size == heads.count]
            if len(dims) == 1 and set(parameter.shape[dims[0] + 1 :]) <= {1, *widths}:
                found[inner_name] = Part("inner", grain=group, dim=dims[0] - parameter.dim())
            elif not dims and parameter.dim() > 1 and parameter.shape[-1] in widths:  # a table of positions
                found[inner_name] = Part("each_head")
            elif dims:
                self.reasons[inner_name] = (
                    "its shape does not show which dim counts heads; rule 'inner' if the last dim does"
                )
        return found

    def _between(self, branch: BlockBranch) -> set[str]:
        """Return the names of the children that a forward calls between the matrices of a branch."""
        home, names = branch.colwise[0].parent_name, {matrix.own_name for matrix in branch.colwise}
        reads, closing = read_outputs(self.modules[home]), branch.rowwise.name.removeprefix(f"{home}.")
        last = closing.partition(".")[0]
        if closing != branch.rowwise.name and last not in reads:
            return set()  # a helper calls the output, so later norms cannot be told from those between
        called = {f"{home}.{key}" for key, read in reads.items() if read & names and last not in read}
        return called & self.modules.keys()

    def _mlp(self, branch: BlockBranch) -> dict[str, Part]:
        """Return the parts of an MLP. It is whole if ranks cannot split a batch norm, or an argument, in the middle."""
        hidden, home = branch.rowwise.inputs, branch.rowwise.parent_name
        reads = read_outputs(self.modules[home])
        before = frozenset[str]().union(*(reads.get(matrix.own_name, ()) for matrix in branch.colwise))
        inside = self.modules[home].named_modules(prefix=home)
        normed = [name for name, one in inside if isinstance(one, BatchNorm) and one.num_features == hidden]
        if normed or any(name.endswith("=") for name in reads.get(branch.rowwise.own_name, before) - before):
            return {name: Part("whole") for name in (*(one.name for one in (*branch.colwise, branch.rowwise)), *normed)}
        cuts: dict[str, Sequence[Cut]] = {}
        norms = {name: as_norm(self.modules[name]) for name in self._between(branch)}
        found = {key: Part("norm", norm=one[1], inner=True) for key, one in norms.items() if one and one[0] == hidden}
        found[branch.rowwise.name] = Part("rowwise", transposed=branch.rowwise.weight_is_transposed)
        for matrix in branch.colwise:
            if matrix.outputs % hidden or matrix.outputs > _GATED * hidden:
                self.reasons[matrix.name] = f"{matrix} does not fit {branch.rowwise}"
            else:
                cuts[matrix.name] = self._cuts(matrix, (hidden,) * (matrix.outputs // hidden), grain=1, heads=None)
                found[matrix.name] = Part(
                    "colwise", transposed=matrix.weight_is_transposed, readers=len(branch.colwise)
                )
        return self._tried(branch.colwise[0].parent_name, found, cuts=cuts, ways=[{}])[0]

    def _cuts(
        self, matrix: MatrixModule, sections: tuple[int, ...], *, grain: int, heads: AttentionHeads | None
    ) -> Sequence[Cut]:
        """Return the possible sections and grains of a colwise matrix: two if it is fused, in an unknown order."""
        given = self.options.get(matrix.name, {})
        if "sections" in given or "grain" in given:
            return [cut_by_rule(matrix, sections=sections, given=given, default=grain)]
        if len(sections) == 1:
            return [((), grain)]
        by_query = heads is None or (len(set(sections)) == 1 and sections[0] == heads.features)
        by_head = ((), grain * len(sections) if by_query or heads is None else matrix.outputs // heads.key_count)
        return [(sections, grain), by_head]

    def torch_attention(self, module: nn.MultiheadAttention, *, name: str) -> dict[str, Part]:
        """Return the parts of torch's MultiheadAttention, whose input matrices are its own parameters, by name."""
        width = module.head_dim
        heads = AttentionHeads(module.num_heads, module.num_heads, width, width)
        self.attentions.append(FoundAttention(name, heads, cut_as_one=True))
        fused, below = (module.embed_dim,) * 3, f"{name}." if name else ""
        found = {
            "in_proj_weight": Part("colwise", sections=fused, grain=width),
            "in_proj_bias": Part("inner", sections=fused, grain=width),
            **{f"{which}_proj_weight": Part("colwise", grain=width) for which in "qkv"},
            **{f"bias_{which}": Part("inner", grain=width) for which in "kv"},
        }
        own = dict(module.named_parameters(recurse=False))
        return {
            name: Part("attention", counts=(("num_heads", 1),), sharded_class=ShardedMultiheadAttention),
            **{f"{below}{key}": part for key, part in found.items() if key in own},
            f"{below}out_proj": Part("rowwise", grain=width),
        }
