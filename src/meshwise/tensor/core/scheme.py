"""A scheme of tensor parallelism as data.

For `Y[T,N] = X[T,K] · W[K,N]` every scheme in the field is a choice of three sets of axes. X is gathered over A, W over
B, Y is reduced over C; the backward of a gather is a reduce-scatter and the reverse. So a `SchemeProduct` states A, B,
C and where W is stored; a `Scheme` states the products of each part. One matmul carries all of them out, and nothing is
written per scheme but its page in `schemes/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Axes = tuple[str, ...]

DIMS: Mapping[str, int] = {"rows": 0, "tokens": -2, "features": -1}
"""The dims of an activation that a move names."""


@dataclass(frozen=True)
class OperandLayoutMove:
    """A collective on one operand, and its conjugate in the backward.

    | axes   over which; () moves nothing
    | dim    which dim it gathers or scatters: `rows` (dim 0), `tokens` (dim -2), `features` (dim -1) of an activation,
    |        `out` or `in` of a weight. `none`: none is split. Every rank has the same X (and the backward sums its
    |        gradients), or all get the whole sum Y (and the backward passes its gradient on)
    """

    axes: Axes = ()
    dim: str = "none"


NOTHING = OperandLayoutMove()


@dataclass(frozen=True)
class SchemeProduct:
    """Y = X·W: what is gathered and reduced, and where W (out, in) is stored.

    out, within   the axes that split W's output and input features, outermost first
    x, w, y       gather X, gather W, reduce Y
    rows          the axes over which ranks hold other rows (or tokens) of Y: over them the bias's gradients are summed
    """

    out: Axes
    within: Axes
    x: OperandLayoutMove = NOTHING
    w: OperandLayoutMove = NOTHING
    y: OperandLayoutMove = NOTHING
    rows: Axes = ()

    @property
    def features(self) -> Axes:
        """The axes that split the features of Y: of the output features of W, once it is gathered."""
        return tuple(axis for axis in self.out if self.w.dim != "out" or axis not in self.w.axes)


@dataclass(frozen=True)
class SchemeLookup:
    """An embedding: a product whose X selects rows of W (vocabulary, features), stored like the head's weight.

    `w` gathers W's features (dim `in` of the head's weight); a rank looks up the part of the vocabulary it has, and
    `y` adds the parts up.
    """

    vocabulary: Axes
    features: Axes
    w: OperandLayoutMove
    y: OperandLayoutMove


@dataclass(frozen=True)
class Scheme:
    """The products of each part, and which axes split the activations.

    | stream, inner      the axes that split the features of the hidden states, and of what lies within a pair
    | rows, inner_rows   the axes that split the rows of the batch there, besides `replicas`
    | tokens             the axes that split the tokens of the hidden states
    | kv_replicas        of `inner`, the axes whose ranks share their keys and values; see `kv_replicas`
    | replicas           the axes whose ranks hold copies of all parameters under every scheme
    | experts            the axes that split the leading dim of weights (experts, out, in)
    """

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
        """The axes whose ranks have different heads or inner features, and equal copies of tensors from outside."""
        return tuple(axis for axis in (*self.inner, *self.inner_rows) if axis not in self.rows)
