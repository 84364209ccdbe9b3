"""Find the tensor-parallel role of each module from sizes, containers and order, and apply the roles of rules.

docs/tensor.md has the evidence for each role."""

import itertools
from collections.abc import Iterator, Mapping

from torch import nn

from meshwise.base.batch_norm_classes import BatchNorm
from meshwise.plan import Plan
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.detect.attention_heads import cut_by_rule
from meshwise.tensor.detect.attention_names import enclosing
from meshwise.tensor.detect.column_row_pairs import BranchFinder, ColumnRowPairs, hidden_width
from meshwise.tensor.detect.layer_formulas import (
    PATCH_CONVOLUTIONS,
    as_matrix,
    as_norm,
    computes_as,
    matrices,
    mixes_no_features,
    returns_table_rows,
)
from meshwise.tensor.split_trial import SplitTrials

_KNOWN = ("torch", "transformers", "meshwise")
"""Packages in whose modules no buffer has a dim of all features of the hidden states."""


class ModelStructure:
    """Parts of all modules of a model, found from its structure and from stated roles.

    | stated       roles by module or parameter name, from rules and from the model's `_tp_plan`
    | options      options of rules, such as heads=8, by the same names
    | plan         the plan, whose ranks share the heads of attentions
    | modules      modules by name; `blocks`: the repeated blocks among them
    | width        number of features of the hidden states (of several, of the vocabulary's embedding); None if unknown
    | parts        result: parts by module or parameter name, as far as they were found
    | attentions   result: the attentions, with their heads"""

    def __init__(
        self, module: nn.Module, *, stated: Mapping[str, str], options: Mapping[str, Mapping[str, int]], plan: Plan
    ) -> None:
        self.modules = dict(module.named_modules())
        self.blocks = dict(_blocks(module, name=""))
        self._stated = stated
        self._options = options
        self._reasons: dict[str, str] = {}
        self._branches: set[str] = set()
        self._splits_features = plan.tp_mode != "1d"
        self._trials = SplitTrials(plan)
        self._pairs = ColumnRowPairs(self.modules, options, self._reasons, plan, self._trials)
        self._regions = self.blocks or {"": module}
        outside = [p for name, p in module.named_parameters() if p.dim() and not self._in_block(name)]
        sizes = {parameter.size(-1) for parameter in outside}
        lists = itertools.groupby(self._regions, key=lambda name: name.rpartition(".")[0])
        self._widths = {key: hidden_width([self._regions[n] for n in names], outside=sizes) for key, names in lists}
        self._vocabulary = self._find_vocabulary()
        usual = hidden_width(self._regions.values(), outside=sizes)
        self.width = self._vocabulary.embedding_dim if self._vocabulary else usual
        self.parts: dict[str, Part] = {}
        self.attentions = self._pairs.attentions
        for name, block in self._regions.items():
            self._read_block(block, name)
        for name, inner in self.modules.items():
            if name not in self._reasons and not self._is_kept_whole(name):
                self._read_module(inner, name)
        for name, role in stated.items():
            self._state(name, role)

    @property
    def needs_all_features(self) -> bool:
        """True if a user's module outside of the blocks has a buffer with rows of all features of the hidden states."""
        outside = [module for name, module in self.modules.items() if not self._in_block(name)]
        own = [module for module in outside if type(module).__module__.partition(".")[0] not in _KNOWN]
        tables = [buffer for module in own for buffer in module.buffers(recurse=False) if buffer.is_floating_point()]
        return any(table.dim() > 1 and table.size(-1) == self.width for table in tables)

    def reason(self, name: str) -> str:
        """Return the reason why a parameter has no role, or ""."""
        return next((self._reasons[key] for key in (name, *enclosing(name)) if key in self._reasons), "")

    def wrong_splits(self, parts: Mapping[str, Part]) -> list[str]:
        """Return the names of attentions and MLPs that compute something else under `parts`, and note the reasons."""
        homes = {enclosing(name)[0]: None for name, part in parts.items() if part.role == "colwise"}
        errors = {name: self._trials.error(self.modules[name], name=name, parts=parts) for name in homes}
        self._reasons |= {name: f"in a trial, {error}" for name, error in errors.items() if error}
        return [name for name, error in errors.items() if error]

    def writes_hidden_states(self, name: str) -> bool:
        """Return whether `name` is a matrix in a block, with an output as wide as the hidden states."""
        matrix = as_matrix(self.modules[name], name=name) if name in self.modules else None
        return matrix is not None and matrix.outputs == self._width_at(name) and self._in_block(name)

    def _width_at(self, name: str) -> int | None:
        """Return the width of the hidden states at a module or parameter: of the blocks with the most similar name."""
        common = {blocks: len({blocks, *enclosing(blocks)} & {name, *enclosing(name)}) for blocks in self._widths}
        widths = [self._widths[blocks] for blocks, number in common.items() if number == max(common.values())]
        return self.width if self.width in widths or not widths else widths[0]

    def _read_block(self, block: nn.Module, name: str) -> None:
        width = self._width_at(name)
        if width is None or self._is_kept_whole(name):
            return
        branches, left = BranchFinder(width, self._stated, self.modules.keys()).branches(block, name=name)
        if name:
            for item in left:
                self._reasons.setdefault(item.matrix.name, f"{item.matrix} forms no pair with another matrix")
            self.parts[name] = Part("block", hidden_width=width)
        for inner, module in block.named_modules(prefix=name):
            if computes_as(module, kind=nn.MultiheadAttention) and not self._is_kept_whole(inner):
                assert isinstance(module, nn.MultiheadAttention)
                self.parts |= self._pairs.torch_attention(module, name=inner)
        for branch in branches:
            around = [set(enclosing(matrix.name)) for matrix in (*branch.colwise, branch.rowwise)]
            self._branches.add(max(set.intersection(*around), key=len))
        self.parts |= self._pairs.parts(branches, block=name)

    def _read_module(self, module: nn.Module, name: str) -> None:
        """Give a part to a module outside of pairs, by its class, formula and position; else note a reason."""
        around = self.parts[name].role if name in self.parts else ""
        if around not in ("", "block", "pair", "attention"):
            return
        parameters = dict(module.named_parameters(recurse=False))
        of_torch = type(module).__module__.partition(".")[0] == "torch"
        norm, width, in_block = None if around else as_norm(module), self._width_at(name), self._in_block(name)
        if computes_as(module, kind=nn.TransformerEncoder):
            self.parts[name] = Part("pair")
        elif norm is not None and norm[0] == width:
            self.parts[name] = Part("norm", norm=norm[1])
        elif isinstance(module, BatchNorm) and not around and (module.num_features == width or not in_block):
            self.parts[name] = Part("whole")
        elif parameters and not around and not in_block and (role := self._role_outside(module, name)):
            matrix = as_matrix(module, name=name)
            self.parts[name] = Part(role, transposed=matrix is not None and matrix.weight_is_transposed)
        elif not any(True for _ in module.children()) and not mixes_no_features(module):
            between = any(holder in self._branches for holder in enclosing(name))
            vectors = parameters and all(parameter.dim() == 1 for parameter in parameters.values())
            of_hidden = vectors and all(parameter.numel() == width for parameter in parameters.values())
            if of_hidden and not of_torch and not between and not self._splits_features:
                self.parts[name] = Part("whole")  # each rank has all features
            else:
                self._reasons[name] = _why_unknown(module)
        elif around or not of_torch:
            for key, parameter in parameters.items():
                self._read_parameter(f"{name}.{key}" if name else key, parameter, in_attention=around == "attention")

    def _read_parameter(self, name: str, parameter: nn.Parameter, *, in_attention: bool) -> None:
        """Give the part `vector` to a parameter of a user's module whose last dim is the width.

        It must have one row, or be a table outside of the blocks. A square table may be a matrix: it needs a rule."""
        width = self._width_at(name)
        if name in self.parts or parameter.shape[-1:] != (width,):
            return
        table = not self._in_block(name) and parameter.shape[0] != width
        if not (table or parameter.numel() == width):
            return
        if in_attention:
            self._reasons[name] = "as wide as hidden states and as all heads: rule 'vector', or 'inner grain=number'"
        else:
            self.parts[name] = Part("vector")

    def _role_outside(self, module: nn.Module, name: str) -> str | None:
        """Return the role of one of torch's layers outside of the blocks; None for other modules."""
        width = self._width_at(name)
        if matrix := as_matrix(module, name=name):
            if self._vocabulary is not None and matrix.inputs == self.width:
                tied = getattr(module, "weight", None) is self._vocabulary.weight
                if tied and not returns_table_rows(self._vocabulary):
                    return "whole"  # as the embedding that it is tied to
                if tied or self.width != matrix.outputs == self._vocabulary.num_embeddings:
                    return "head"
            if matrix.outputs != width or matrix.weight_is_transposed:
                return "whole"
            return "single" if matrix.inputs == width else "patches"
        if isinstance(module, nn.Embedding):
            if module.embedding_dim != width:
                return "whole"
            shared = self._vocabulary is not None and module.weight is self._vocabulary.weight
            shared = shared and returns_table_rows(module)
            return "embedding" if shared else "positions"
        if isinstance(module, PATCH_CONVOLUTIONS):
            return "patches" if module.out_channels == width else "whole"
        return "whole" if as_norm(module) else None

    def _find_vocabulary(self) -> nn.Embedding | None:
        """Return the vocabulary's embedding: an embedding outside of the blocks, as wide as the hidden states; or None.

        Of several, take one tied to a linear, else the largest if a linear has as many outputs, else the first."""
        outside = [module for name, module in self.modules.items() if not self._in_block(name)]
        tables = [module for module in outside if isinstance(module, nn.Embedding)]
        found = [table for table in tables if table.embedding_dim in self._widths.values()]
        linears = [module for module in outside if isinstance(module, nn.Linear)]
        sizes = {linear.out_features for linear in linears} - {*self._widths.values()}
        largest = max((table.num_embeddings for table in found), default=0)

        def rank(table: nn.Embedding) -> tuple[bool, bool]:
            tied = any(linear.weight is table.weight for linear in linears)
            return tied, table.num_embeddings in sizes and table.num_embeddings == largest

        return max(found, key=rank, default=None)

    def _state(self, name: str, role: str) -> None:
        """Replace a found part by the stated role. Raises ValueError if the role does not fit the module."""
        module = self.modules.get(name)
        matrix = as_matrix(module, name=name) if module is not None else None
        if _replaces_own_forward(module, role):
            raise ValueError(
                f"a rule or `_tp_plan` gives {name!r} the role {role!r}, which would replace the forward of "
                f"{type(module).__name__}, but this forward computes something else. Roles that keep the forward: "
                "positions, vector, inner, each_head, whole"
            )
        given = self._options.get(name, {})
        sections: tuple[int, ...] = ()
        grain, transposed = given.get("grain", 1), matrix is not None and matrix.weight_is_transposed
        if role == "attention":
            if name not in self.parts or self.parts[name].role != "attention":
                raise ValueError(f"a rule gives {name!r} the role 'attention', but no pair of matrices is in it")
        elif role in ("colwise", "rowwise"):
            if name in self.parts or name in self._reasons:
                return  # its part comes from a pair, or a reason was noted
            if matrix and role == "colwise":
                sections, grain = cut_by_rule(matrix, sections=(matrix.outputs,), given=given, default=1)
            self.parts[name] = Part(role, sections=sections, grain=grain, transposed=transposed)
        elif role == "norm":
            norm = as_norm(module) if module is not None else None
            if norm is None:
                raise ValueError(f"{name!r} has the role 'norm', but it computes neither LayerNorm nor RMSNorm")
            self.parts[name] = Part("norm", norm=norm[1])
        else:
            self.parts[name] = Part(role, grain=grain, transposed=transposed)

    def _in_block(self, name: str) -> bool:
        return any(holder in self.blocks for holder in (name, *enclosing(name)))

    def _is_kept_whole(self, name: str) -> bool:
        return any(self._stated.get(holder) == "whole" for holder in (name, *enclosing(name)))


def _why_unknown(module: nn.Module) -> str:
    """Return the reason why a module without children gets no role."""
    kind = next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), None)
    if kind is None:
        return f"{type(module).__name__} is no known norm, and it may mix features"
    own = "" if computes_as(module, kind=kind) else ", with a forward of its own"
    return f"{type(module).__name__} in a block, outside of its pairs{own}"


def _replaces_own_forward(module: nn.Module | None, role: str) -> bool:
    """Return whether this role would replace a forward that is not one of a linear layer or an embedding."""
    if module is None or role not in ("colwise", "rowwise", "single", "head", "embedding"):
        return False
    return not returns_table_rows(module) if role == "embedding" else as_matrix(module, name="") is None


def _blocks(module: nn.Module, *, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each block: an entry of an outermost list, with an attention or two matrices."""
    for child_name, child in module.named_children():
        below = f"{name}.{child_name}" if name else child_name
        entry = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        attention = any(isinstance(inner, nn.MultiheadAttention) for inner in child.modules())
        pair = attention or sum(1 for _ in matrices(child, name="")) >= 2
        if entry and not container and pair:
            yield below, child
        else:
            yield from _blocks(child, name=below)
