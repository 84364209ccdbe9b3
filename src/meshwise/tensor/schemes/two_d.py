"""2D: each matrix on a q x q grid (Xu et al., "Optimus", arXiv 2104.05343; SUMMA, van de Geijn and Watts, 1997).

    X  T/row, K/col ── gathered over col ──┐
    W  K/row, N/col ── gathered over row ──┴── Y  T/row, N/col          as X is stored: layers follow on each other

Nothing is whole on any rank: parameters and activations are 1/q² each. A linear gathers T·K/q elements of X and K·N/q
of W in the forward, and reduce-scatters as many in the backward. Unless the gathered operands are kept, the backward
gathers them again. For a block of width h with an MLP of 4h, b·s tokens in all, that is Optimus' formula:

    forward   (7 b·s·h + 12 h²) / q          backward   the same, kept; twice that, free

With the heads and the rows of the batch both local, attention needs no communication. The embedding is the head's
product backwards. Its table, stored like the head's (so that they may be tied), gathers the features over row, looks up
its part of the vocabulary, and scatters the sum over col along the features.
"""

from meshwise.tensor.core.scheme import Axes, OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct


def two_d(rows: Axes = ("row",)) -> Scheme:
    """`rows`: the axes that split the batch; W is stored over `row` in any case."""
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
