"""Data classes that describe a scheme of tensor parallelism: the layouts and collectives of each matrix product.

Every known scheme computes `Y[T,N] = X[T,K] · W[K,N]` with three sets of axes: X is gathered over A, W is gathered over
B, and Y is reduced over C. In the backward, a gather becomes a reduce-scatter, and the reverse. So a `SchemeProduct`
has A, B, C and the layout of W, and a `Scheme` has the products of all roles. One function, `core/matmul.py`, computes
every product; each file in `schemes/` is one `Scheme`."""

from collections.abc import Mapping
from dataclasses import dataclass

Axes = tuple[str, ...]
"""Names of mesh axes, outermost first."""

DIMS: Mapping[str, int] = {"rows": 0, "tokens": -2, "features": -1}
"""Dim of an activation for each name in `OperandLayoutMove.dim`."""


@dataclass(frozen=True)
class OperandLayoutMove:
    """Collective on one operand X, W or Y of a product; the backward runs the matching collective.

    | axes   the axes of the collective; () for no collective
    | dim    the dim that is gathered (X, W) or scattered (Y): `rows` (dim 0), `tokens` (dim -2) or `features` (dim -1)
    |        of an activation, `out` or `in` of a weight. `none`: no dim is split. Then X is whole on all ranks, and its
    |        gradient is summed in the backward; or Y is all-reduced, and its gradient stays as it is"""

    axes: Axes = ()
    dim: str = "none"


NO_MOVE = OperandLayoutMove()
"""Move of an operand without a collective."""


@dataclass(frozen=True)
class SchemeProduct:
    """Product Y = X·W: the collectives on the operands, and the layout of the stored W (out, in).

    | out, within   the axes that split W's output features, and W's input features
    | x, w, y       the gather of X, the gather of W, the reduction of Y
    | rows          the axes whose ranks have different rows (or tokens) of Y; the bias's gradient is summed over them
    """

    out: Axes
    within: Axes
    x: OperandLayoutMove = NO_MOVE
    w: OperandLayoutMove = NO_MOVE
    y: OperandLayoutMove = NO_MOVE
    rows: Axes = ()

    @property
    def features(self) -> Axes:
        """Axes that split the features of Y: the axes that split the output features of the gathered W."""
        return tuple(axis for axis in self.out if self.w.dim != "out" or axis not in self.w.axes)


@dataclass(frozen=True)
class SchemeLookup:
    """Embedding of the vocabulary: the layout of its table W (vocabulary, features), and its collectives.

    | vocabulary, features   the axes that split the table; it is stored like the head's weight (out, in)
    | w                      the gather of the table's features (dim `in` of the head's weight)
    | y                      the sum of the embeddings; for a token of another rank's vocabulary, a rank adds zeros"""

    vocabulary: Axes
    features: Axes
    w: OperandLayoutMove
    y: OperandLayoutMove


@dataclass(frozen=True)
class Scheme:
    """Layouts of a scheme of tensor parallelism: the products of each role, and the axes that split activations.

    | head               the product of roles `head` and `single`
    | stream, inner      the axes that split the features of the hidden states, and the inner features of a pair
    | rows, inner_rows   the axes that split rows of the hidden states, and rows inside a pair, besides `replicas`
    | tokens             the axes that split the tokens of the hidden states
    | kv_replicas        the axes of `inner` whose ranks hold the same keys and values; see `schemes/kv_replicas.py`
    | replicas           the axes whose ranks hold copies of all parameters under every scheme
    | experts            the axes that split the leading dim of weights (experts, out, in)"""

    colwise: SchemeProduct
    rowwise: SchemeProduct
    head: SchemeProduct
    embedding: SchemeLookup
    stream: Axes
    inner: Axes
    rows: Axes = ()
    inner_rows: Axes = ()
    tokens: Axes = ()
    kv_replicas: Axes = ()
    replicas: Axes = ()
    experts: Axes = ()

    @property
    def head_axes(self) -> Axes:
        """Axes whose ranks have equal rows of the hidden states, but different heads or rows inside a pair."""
        return tuple(axis for axis in (*self.inner, *self.inner_rows) if axis not in self.rows)
