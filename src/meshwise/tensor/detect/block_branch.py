"""Find the branches of a block: the matrices that read the hidden states, and the matrix that writes to them.

A transformer block adds the outputs of branches (attention, MLP) to hidden states of one width:

    hidden states ──┬── colwise ──┬── (heads, activation: between the two nothing mixes features) ── rowwise ──┬── +
                    └── colwise ──┘                                                                            │
    hidden states ─────────────────────────────────────────────────────────────────────────────────────────────┘

The colwise matrices of a branch read the hidden states. The rowwise matrix writes them. In between, every feature or
every head is independent, so ranks split the features and communicate only at the ends. Sizes show the role of most
matrices: a rowwise matrix writes the width of the hidden states, a colwise matrix another size. A square matrix can be
either, such as the queries and the output of most attentions. Then the registration order shows where a branch ends:

    | a matrix that is rowwise by its sizes              expansion 8x32, projection 32x8
    | a square after a matrix that is colwise by size    qkv 8x24, output 8x8
    | the fourth of four squares, in attention           q, k, v, output
    | the second of two squares, otherwise               an MLP whose hidden size is the width

The rules for squares apply at the end of the module that holds the matrices, or where the next branch begins. So q, k
and v may be in one module and the output in the next. The rowwise matrix may be registered before the colwise ones, if
their module holds no other matrix. Roles that the user or the model declares take precedence over sizes."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwise.tensor.detect.attention_heads import counts_heads
from meshwise.tensor.detect.matrix_modules import MatrixModule, as_matrix, matrices

_SQUARES_OF_ATTENTION = 4
_SQUARES_OF_MLP = 2


@dataclass(frozen=True)
class BlockBranch:
    """Matrices of one attention or MLP: colwise ones read the hidden states, the rowwise one writes them."""

    colwise: tuple[MatrixModule, ...]
    rowwise: MatrixModule

    @property
    def names(self) -> list[str]:
        """Names of the colwise matrices and the rowwise matrix."""
        return [matrix.name for matrix in (*self.colwise, self.rowwise)]

    @property
    def looks_like_attention(self) -> bool:
        """True for three or more colwise matrices, or one that writes three times what the rowwise matrix reads."""
        writes = [matrix.outputs for matrix in self.colwise]
        return len(writes) >= 3 or (len(writes) == 1 and writes[0] == 3 * self.rowwise.inputs)


def hidden_width(blocks: Iterable[nn.Module], *, outside: Collection[int]) -> int | None:
    """Return the width of the hidden states: the size that the most matrices of the blocks read or write.

    Only sizes that some matrix reads and some matrix writes count. Among equally frequent sizes, one in `outside` (last
    dims of parameters outside of the blocks) wins, then the one read first. None if there is no such size."""
    uses: Counter[int] = Counter()
    read: list[int] = []
    written = set()
    for block in blocks:
        for matrix in matrices(block, name=""):
            uses.update({matrix.inputs, matrix.outputs})
            read.append(matrix.inputs)
            written.add(matrix.outputs)
        for module in block.modules():
            if isinstance(module, nn.MultiheadAttention):
                uses[module.embed_dim] += 2
                read.append(module.embed_dim)
                written.add(module.embed_dim)
    return max((size for size in read if size in written), key=lambda size: (uses[size], size in outside), default=None)


@dataclass(frozen=True)
class BranchFinder:
    """Finder of the branches in the blocks of a model, from sizes and stated roles."""

    width: int
    """Number of features of the hidden states."""
    declared: Mapping[str, str]
    """Roles by module name that the user or the model states. "colwise" and "rowwise" are for matrices; any other role
    keeps a matrix out of branches. Other modules may be "attention" or "whole"."""
    names: Collection[str]
    """First name of each module of the model. A module with several names is read under this name only."""

    def branches(self, block: nn.Module, *, name: str) -> tuple[list[BlockBranch], list[MatrixModule]]:
        """Return the branches of a block called `name`, and its matrices that belong to no branch."""
        found: list[BlockBranch] = []
        left = self._walk(block, name, found)
        return found, [item.matrix for item in left]

    def _walk(self, module: nn.Module, name: str, found: list[BlockBranch]) -> "list[_Item]":
        """Append the branches that end inside a module to `found`, and return the matrices of an unfinished branch."""
        left: list[_Item] = []
        before = len(found)
        own_heads = counts_heads(module) or self.declared.get(name) == "attention"
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            if below not in self.names or isinstance(child, nn.MultiheadAttention):
                continue  # read under its first name, or an attention that holds its own matrices
            if self.declared.get(below) == "whole":
                continue
            matrix = as_matrix(child, name=below)
            if matrix is None:
                items = self._walk(child, below, found)
            else:
                role = self._role(matrix)
                items = [_Item(matrix, role, own_heads)] if role in ("colwise", "rowwise", "") else []
            for item in items:
                if item.role == "colwise" and _ends(left):
                    found.append(_branch(left))
                    left = []
                left.append(item)
                if item.role == "rowwise" and len(left) > 1:
                    found.append(_branch(left))
                    left = []
        if _ends(left):
            found.append(_branch(left))
            left = []
        elif len(left) > 1 and [item.role for item in left] == ["rowwise"] + ["colwise"] * (len(left) - 1):
            found.append(_branch([*left[1:], left[0]]))  # Phi-3 registers the output before q, k and v
            left = []
        elif late := _late(left, branches=found[before:], holder=name):
            found[-1], left = late, []
        return left

    def _role(self, matrix: MatrixModule) -> str:
        if matrix.name in self.declared:
            return self.declared[matrix.name]
        if matrix.inputs == matrix.outputs == self.width:
            return ""
        return "rowwise" if matrix.outputs == self.width else "colwise"


@dataclass(frozen=True)
class _Item:
    """Matrix with its role ("" if its sizes leave it open), and whether an attention holds it."""

    matrix: MatrixModule
    role: str
    in_attention: bool


def _ends(items: Sequence[_Item]) -> bool:
    """Return whether these matrices are a branch that ends with the last one, a square matrix."""
    if not items or items[-1].role or any(item.role == "rowwise" for item in items):
        return False
    if any(item.role == "colwise" for item in items):
        return True
    attention = any(item.in_attention for item in items)
    return len(items) == (_SQUARES_OF_ATTENTION if attention else _SQUARES_OF_MLP)


def _late(items: Sequence[_Item], *, branches: Sequence[BlockBranch], holder: str) -> BlockBranch | None:
    """Return a module's only branch plus the colwise matrices registered after it; None if these do not fit."""
    if len(branches) != 1 or not items:
        return None
    hidden = branches[0].rowwise.inputs
    all_matrices = [*(item.matrix for item in items), *branches[0].colwise, branches[0].rowwise]
    if hidden == branches[0].rowwise.outputs or any(matrix.parent_name != holder for matrix in all_matrices):
        return None
    if any(item.role != "colwise" or item.matrix.outputs != hidden for item in items):
        return None
    return BlockBranch((*branches[0].colwise, *(item.matrix for item in items)), branches[0].rowwise)


def _branch(items: Sequence[_Item]) -> BlockBranch:
    *colwise, rowwise = (item.matrix for item in items)
    return BlockBranch(tuple(colwise), rowwise)
