"""Find the matrices of a block that form a pair.

A transformer block adds branches to hidden states of one width:

    hidden states ──┬── colwise ──┬── (heads, activation: between the two nothing mixes features) ── rowwise ──┬── +
                    └── colwise ──┘                                                                            │
    hidden states ─────────────────────────────────────────────────────────────────────────────────────────────┘

The colwise matrices of a branch read the hidden states, the rowwise one writes them, and between them every feature,
or every head, is independent. So ranks can share the features and communicate only at the end. Sizes show the role of
most matrices: one that reads the width and writes another size is colwise, the reverse is rowwise. A square one can be
either: the queries and the output of an attention usually are. Then the order of registration decides: a branch ends at

    | a matrix that is rowwise by its sizes              expansion 8x32, projection 32x8
    | a square after one that is colwise by its sizes    qkv 8x24, output 8x8
    | the fourth of four squares, in attention           q, k, v, output
    | the second of two squares, elsewhere               an MLP whose hidden size is the width

at the end of the module that holds them (q, k and v may be in one module and the output in the next), or where another
branch begins. A gate may be registered behind the rowwise matrix, if its module holds nothing else. What the user or
the model declares takes precedence.
"""

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
    """The matrices that read the hidden states, and the one that writes them."""

    colwise: tuple[MatrixModule, ...]
    rowwise: MatrixModule

    @property
    def names(self) -> list[str]:
        """Names of its matrices."""
        return [matrix.name for matrix in (*self.colwise, self.rowwise)]

    @property
    def looks_like_attention(self) -> bool:
        """True if the sizes fit an attention and little else."""
        writes = [matrix.outputs for matrix in self.colwise]
        return len(writes) >= 3 or (len(writes) == 1 and writes[0] == 3 * self.rowwise.inputs)


def stream_width(blocks: Iterable[nn.Module], *, outside: Collection[int]) -> int | None:
    """Return the width of hidden states: the size that most matrices of the blocks use, and that is read and written.

    Among equals, as in blocks of one MLP each, prefer a size that is the last dim of parameters `outside` of the
    blocks, then the first that is read. Return None if no size is both read and written.
    """
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
class BlockReading:
    """The facts about a model by which its blocks are searched for branches."""

    width: int

    declared: Mapping[str, str]
    """Stated roles by name: of matrices ("colwise", "rowwise", any other word for one in no branch) and of modules
    ("attention", "whole")."""
    names: Collection[str]
    """The first name of each module of the model. A module with several names is read once."""

    def branches(self, block: nn.Module, *, name: str) -> tuple[list[BlockBranch], list[MatrixModule]]:
        """Return the branches of a block called `name`, and the matrices that belong to none."""
        found: list[BlockBranch] = []
        left = self._walk(block, name, found)
        return found, [item.matrix for item in left]

    def _walk(self, module: nn.Module, name: str, found: list[BlockBranch]) -> "list[_Item]":
        """Find the branches that end inside a module, and return the matrices of the one that does not."""
        left: list[_Item] = []
        before = len(found)
        own_heads = counts_heads(module) or self.declared.get(name) == "attention"
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            if below not in self.names or isinstance(child, nn.MultiheadAttention):
                continue  # known by another name, or a branch by itself
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
    """A matrix, its role as far as it is known, and whether the module that holds it counts heads."""

    matrix: MatrixModule
    role: str
    in_attention: bool


def _ends(items: Sequence[_Item]) -> bool:
    """Return whether the last of these matrices can only be rowwise."""
    if not items or items[-1].role or any(item.role == "rowwise" for item in items):
        return False
    if any(item.role == "colwise" for item in items):
        return True
    attention = any(item.in_attention for item in items)
    return len(items) == (_SQUARES_OF_ATTENTION if attention else _SQUARES_OF_MLP)


def _late(items: Sequence[_Item], *, branches: Sequence[BlockBranch], holder: str) -> BlockBranch | None:
    """Return the only branch of a module with the colwise matrices that are registered behind its rowwise one: w1, w2,
    w3 of a gated MLP, where w2 is rowwise.
    """
    if len(branches) != 1 or not items:
        return None
    hidden = branches[0].rowwise.inputs
    all_matrices = [*(item.matrix for item in items), *branches[0].colwise, branches[0].rowwise]
    if hidden == branches[0].rowwise.outputs or any(matrix.home != holder for matrix in all_matrices):
        return None
    if any(item.role != "colwise" or item.matrix.outputs != hidden for item in items):
        return None
    return BlockBranch((*branches[0].colwise, *(item.matrix for item in items)), branches[0].rowwise)


def _branch(items: Sequence[_Item]) -> BlockBranch:
    *colwise, rowwise = (item.matrix for item in items)
    return BlockBranch(tuple(colwise), rowwise)
