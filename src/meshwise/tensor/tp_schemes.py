"""Schemes of tensor parallelism 1D, 2D, 2.5D and 3D: the layouts and collectives of each matrix product, as data.

Every known scheme computes `Y[T,N] = X[T,K] · W[K,N]` with three sets of axes: X is gathered over A, W is gathered over
B, and Y is reduced over C. In the backward, a gather becomes a reduce-scatter, and the reverse. So a `SchemeProduct`
has A, B, C and the layout of W, and a `Scheme` has the products of all roles. One function, `core/matmul.py`, computes
every product; `one_d`, `two_d` and `three_d` return the schemes, and `scheme_on` the scheme of a plan.

Grouped-query attention may be split over more ranks than KV heads. Then several ranks hold the same KV head, and the
mesh axis that splits the heads becomes two axes (`mesh_with_kv_replicas`). The outer axis splits the KV heads. Ranks
along the inner axis, `kv`, hold the same KV head:

    | 4 heads, 2 KV heads             tp=0                    tp=1
    | on 4 ranks                 kv=0        kv=1        kv=0        kv=1
    | q                            0           1           2           3
    | k, v                         0           0           1           1          gradients summed over kv

Other tensors that the original axis would split are split over both axes."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.base.mesh import Mesh
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.module_role import Part

Axes = tuple[str, ...]
"""Names of mesh axes, outermost first."""

DIMS: Mapping[str, int] = {"rows": 0, "tokens": -2, "features": -1}
"""Dim of an activation for each name in `OperandLayoutMove.dim`."""


@dataclass(frozen=True)
class OperandLayoutMove:
    """Collective on one operand X, W or Y of a product; the backward runs the matching collective.

    | axes   the axes of the collective; () for no collective
    | dim    the dim that is gathered (X, W) or scattered (Y): `rows` (dim 0), `tokens` (dim -2) or `features` (dim -1)
    |        of an activation, `out` or `in` of a weight. `none`: no dim is split. X is then whole on all ranks, and the
    |        backward sums its gradient. Y is then all-reduced, and the backward leaves its gradient unchanged"""

    axes: Axes = ()
    dim: str = "none"


NO_MOVE = OperandLayoutMove()


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
class Scheme:
    """Layouts of a scheme of tensor parallelism: the products of each role, and the axes that split activations.

    | head               the product of roles `head` and `single`. The embedding is this product transposed:
    |                    its table is stored like the head's W, and its output is reduced over the axes of the head's
    |                    `x`. Before this, a rank has zeros for tokens outside of its part of the vocabulary
    | hidden, inner      the axes that split the features of the hidden states, and the inner features of a pair
    | rows, inner_rows   the axes that split rows of the hidden states, and rows inside a pair, besides `replicas`
    | tokens             the axes that split the tokens of the hidden states
    | kv_replicas        the axes of `inner` whose ranks hold the same keys and values; see `mesh_with_kv_replicas`
    | replicas           the axes whose ranks hold copies of all parameters under every scheme
    | experts            the axes that split the leading dim of weights (experts, out, in)"""

    colwise: SchemeProduct
    rowwise: SchemeProduct
    head: SchemeProduct
    hidden: Axes
    inner: Axes
    rows: Axes = ()
    inner_rows: Axes = ()
    tokens: Axes = ()
    kv_replicas: Axes = ()
    replicas: Axes = ()
    experts: Axes = ()


def one_d(*, sequence: bool) -> Scheme:
    """Return the scheme 1D: each matrix is split over the axis tp (Shoeybi et al., "Megatron-LM", arXiv 1909.08053).

    The first linear of a pair is split by columns, the second by rows. Only the ends of a pair communicate:

        X whole ── colwise W/out ── inner/features ── rowwise W/in ── sum over tp ── whole

    A block of two pairs with b·s tokens of h features takes 2 all-reduces of b·s·h elements in the forward and 2 in the
    backward. With `sequence` the tokens of the hidden states are split too (Korthikanti et al., arXiv 2205.05198). Then
    each all-reduce becomes a reduce-scatter and an all-gather of b·s·h elements: the same traffic, but tensors between
    pairs take 1/tp of the memory. The backward gathers X once more for the gradient of W, unless X is kept.

    The embedding and the head split the vocabulary. Each takes one all-reduce of b·s·h elements: the embedding in the
    forward, the head in the backward."""
    tp = ("tp",)
    moved = OperandLayoutMove(tp, "tokens" if sequence else "none")
    return Scheme(
        colwise=SchemeProduct(out=tp, within=(), x=moved),
        rowwise=SchemeProduct(out=(), within=tp, y=moved, rows=tp if sequence else ()),
        head=SchemeProduct(out=tp, within=(), x=OperandLayoutMove(tp)),
        hidden=(),
        inner=tp,
        tokens=tp if sequence else (),
    )


def two_d(rows: Axes = ("row",)) -> Scheme:
    """Return the scheme 2D or 2.5D: each matrix is split over a q x q grid (Xu et al., "Optimus", arXiv 2104.05343).

    `rows`: axes that split the batch; W is split over `row` and `col` in any case. The product is SUMMA (van de Geijn
    and Watts, 1997) on axes row and col, with T tokens, K input and N output features:

        X  T/row, K/col ── gathered over col ──┐
        W  K/row, N/col ── gathered over row ──┴── Y  T/row, N/col          the layout of X in the next linear

    docs/tensor.md has what a rank holds and moves ("Communication").

    Heads and rows of the batch are both local, so attention needs no communication. The embedding's table is stored
    like the head's weight, so that the two may be tied. A rank has a part of the vocabulary and of the features. It
    gathers the features over row, and looks up its tokens. Results are reduce-scattered over col, by feature.

    Scheme 2.5D has d such grids (Wang et al., "Tesseract", arXiv 2105.14500; Solomonik and Demmel, 2011) along the axis
    depth. They hold copies of the parameters and split the rows of the batch: X is T/(depth·row), K/col. With d = 1 the
    scheme is 2D; with q = 1 it is data parallelism."""
    features, inputs = OperandLayoutMove(("col",), "features"), OperandLayoutMove(("row",), "in")
    linear = SchemeProduct(out=("col",), within=("row",), x=features, w=inputs, rows=rows)
    return Scheme(
        colwise=linear, rowwise=linear, head=linear, hidden=("col",), inner=("col",), rows=rows, inner_rows=rows
    )


def three_d() -> Scheme:
    """Return the scheme 3D: a p x p x p cube (Bian et al., "Maximizing Parallelism", arXiv 2105.14450).

    The cube has the axes i, j and l (Agarwal et al., 1995). Every operand is stored in p³ parts, and multiplied or
    reduced in p² parts. T is the number of tokens; K and N are features. The two linears of a pair exchange j and l:

        | colwise  X  T/(i·j), K/l     W  K/(l·i), N/j     gather X over j, W over i; reduce Y over l, scattered on T
        |          Y  T/(i·l), N/j     as X of rowwise
        | rowwise  X  T/(i·l), K/j     W  K/j, N/(l·i)     gather X over l, W over i; reduce Y over j, scattered on T
        |          Y  T/(i·j), N/l     as X of colwise

    In both linears, i splits W along the features of the hidden states, so heads are never cut. Inside a pair the rows
    of the batch are split over (i, l). So other tensors with a batch dim, such as an attention mask, must be moved.

    The head is the 2D product with (i, j) as row and l as col. Its rows are the hidden states' rows, so labels fit.
    Its logits, the largest tensor of all, are never a partial sum. With a vocabulary of v it gathers h·v/p elements of
    W; a product on the cube would reduce b·s·v/p². The embedding's table is stored like the head's weight."""
    rows_over_j, rows_over_l = OperandLayoutMove(("j",), "rows"), OperandLayoutMove(("l",), "rows")
    features, inputs = OperandLayoutMove(("l",), "features"), OperandLayoutMove(("i", "j"), "in")
    return Scheme(
        colwise=SchemeProduct(
            out=("j",),
            within=("l", "i"),
            x=rows_over_j,
            w=OperandLayoutMove(("i",), "in"),
            y=rows_over_l,
            rows=("i", "l"),
        ),
        rowwise=SchemeProduct(
            out=("l", "i"),
            within=("j",),
            x=rows_over_l,
            w=OperandLayoutMove(("i",), "out"),
            y=rows_over_j,
            rows=("i", "j"),
        ),
        head=SchemeProduct(out=("l",), within=("i", "j"), x=features, w=inputs, rows=("i", "j")),
        hidden=("l",),
        inner=("j",),
        rows=("i", "j"),
        inner_rows=("i", "l"),
    )


def scheme(plan: Plan, *, blocks: bool) -> Scheme:
    """Return a plan's scheme. `blocks`: True for modules in the blocks, where tokens may be split; False outside."""
    if plan.tp_mode == "1d":
        chosen = one_d(sequence=blocks and plan.sequence_parallel == 1)
    elif plan.tp_mode == "3d":
        chosen = three_d()
    else:
        chosen = two_d(rows=("row",) if plan.tp_mode == "2d" else ("depth", "row"))
    return dataclasses.replace(chosen, replicas=plan.replica_axes)


KV_REPLICA = "kv"
"""Axis of the ranks that hold the same KV heads."""


def mesh_with_kv_replicas(plan: Plan, *, parts: Iterable[Part]) -> Mesh:
    """Return the plan's mesh, with the axis `kv` if a part of the model has `kv_replicas` above 1.

    Raises PlanError if `ep` or `etp` takes some of the ranks of the axis that `kv` would divide."""
    mesh, kv_replicas = plan.mesh(), max((part.kv_replicas for part in parts), default=1)
    if kv_replicas == 1:
        return mesh
    axis = scheme(plan, blocks=True).inner[-1]
    if axis not in mesh.names:
        raise PlanError(
            f"under '{plan}' {kv_replicas} ranks share each KV head, and ep or etp takes a part of the ranks of tp. "
            "Use a tp of at most the number of KV heads, or let ep and etp take all ranks of tp, or none of them"
        )
    axes = []
    for name, degree in mesh.axes:
        axes += [(name, degree // kv_replicas), (KV_REPLICA, kv_replicas)] if name == axis else [(name, degree)]
    return Mesh(tuple(axes), joint=tuple((name, _with_kv_replicas(parts, axis)) for name, parts in mesh.joint))


def scheme_on(mesh: Mesh, *, plan: Plan, blocks: bool) -> Scheme:
    """Return the plan's scheme as `scheme` does, with the axis `kv` among its axes if `mesh` has it."""
    plain = scheme(plan, blocks=blocks)
    if KV_REPLICA not in mesh.names:
        return plain
    split: Scheme = _with_kv_replicas(plain, plain.inner[-1])
    return dataclasses.replace(split, kv_replicas=(KV_REPLICA,))


def _with_kv_replicas(value: Any, axis: str) -> Any:
    """Return a scheme or axes with every `axis` replaced by the two axes `axis` and `kv`, also in nested fields."""
    if isinstance(value, tuple):
        return tuple(name for each in value for name in ((each, KV_REPLICA) if each == axis else (each,)))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _with_kv_replicas(getattr(value, field.name), axis) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)
