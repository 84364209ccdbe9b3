"""Schemes 2D and 2.5D: each matrix is split over a q x q grid (Xu et al., "Optimus", arXiv 2104.05343).

The product is SUMMA (van de Geijn and Watts, 1997) on axes row and col, with T tokens, K input and N output features:

    X  T/row, K/col ── gathered over col ──┐
    W  K/row, N/col ── gathered over row ──┴── Y  T/row, N/col          the layout of X in the next linear

A rank holds 1/q² of all parameters and activations. A linear gathers T·K/q elements of X and K·N/q of W in the
forward, and reduce-scatters as many in the backward. Unless the gathered operands are kept, the backward gathers them
again. For a block of width h with an MLP of 4h and b·s tokens in total, all linears together move (Optimus' formula):

    forward   (7 b·s·h + 12 h²) / q elements     backward   the same if operands are kept, else twice as many

Heads and rows of the batch are both local, so attention needs no communication. The embedding's table is stored like
the head's weight, so that the two may be tied. A rank has a part of the vocabulary and of the features. It gathers the
features over row, and looks up tokens in its part of the vocabulary. Results are reduce-scattered over col, by feature.

Scheme 2.5D has d such grids (Wang et al., "Tesseract", arXiv 2105.14500; Solomonik and Demmel, 2011) along the axis
depth. They hold copies of the parameters and split the rows of the batch. So a rank's activations, and the traffic of
activations, are smaller by a factor of d:

    X  T/(depth·row), K/col          W  K/row, N/col, on every grid          Y  T/(depth·row), N/col

    forward of a block    7 b·s·h / (q·d) + 12 h² / q elements      on one grid (7 b·s·h + 12 h²) / q
    gradient of W         12 h² / q² elements per block, summed over depth once per step

With d = 1 the scheme is 2D; with q = 1 it is data parallelism."""

from meshwise.tensor.core.scheme import Axes, OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct


def two_d(rows: Axes = ("row",)) -> Scheme:
    """Return the scheme 2D or 2.5D. `rows`: axes that split the batch; W is split over `row` and `col` in any case."""
    linear = SchemeProduct(
        out=("col",),
        within=("row",),
        x=OperandLayoutMove(("col",), "features"),
        w=OperandLayoutMove(("row",), "in"),
        rows=rows,
    )
    return Scheme(
        colwise=linear,
        rowwise=linear,
        head=linear,
        embedding=SchemeLookup(
            vocabulary=("col",),
            features=("row",),
            w=OperandLayoutMove(("row",), "in"),
            y=OperandLayoutMove(("col",), "features"),
        ),
        stream=("col",),
        inner=("col",),
        rows=rows,
        inner_rows=rows,
    )
