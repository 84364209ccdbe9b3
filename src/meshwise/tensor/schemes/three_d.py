"""3D: each matrix on a p x p x p cube (Bian et al., "Maximizing Parallelism", arXiv 2105.14450; Agarwal et al., 1995).

Every operand is split p³ ways, and every linear gathers, or reduces, only p² ways split ones. The two linears of a pair
exchange the roles of j and l:

    | colwise  X  T/(i·j), K/l     W  K/(l·i), N/j     gather X over j, W over i; reduce Y over l, scattered on T
    |          Y  T/(i·l), N/j     as X of rowwise
    | rowwise  X  T/(i·l), K/j     W  K/j, N/(l·i)     gather X over l, W over i; reduce Y over j, scattered on T
    |          Y  T/(i·j), N/l     as X of colwise

    | forward of one linear   (T·K + K·N + T·N) / p²          backward   the same, kept; X, W twice, free
    | of a block              (16 b·s·h + 12 h²) / p²         7 b·s·h of inputs, 9 of outputs

W is stored over i along the features of the hidden states in both, so that heads are never cut. Within a pair the rows
of the batch are split over (i, l): other tensors with a batch dim there (an attention mask) must be moved.

The head is the 2D product with (i·j) for row and l for col. Its rows stay as in the hidden states, so labels fit them,
and its logits, the largest tensor of all, are never a partial sum. Its W gathers h·v/p elements, where the cube's form
would reduce b·s·v/p². The embedding is stored like it and is that product backwards.
"""

from meshwise.tensor.core.scheme import OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct


def three_d() -> Scheme:
    """Return the only form it has."""
    return Scheme(
        colwise=SchemeProduct(
            out=("j",),
            within=("l", "i"),
            x=OperandLayoutMove(("j",), "rows"),
            w=OperandLayoutMove(("i",), "in"),
            y=OperandLayoutMove(("l",), "rows"),
            rows=("i", "l"),
        ),
        rowwise=SchemeProduct(
            out=("l", "i"),
            within=("j",),
            x=OperandLayoutMove(("l",), "rows"),
            w=OperandLayoutMove(("i",), "out"),
            y=OperandLayoutMove(("j",), "rows"),
            rows=("i", "j"),
        ),
        head=SchemeProduct(
            out=("l",),
            within=("i", "j"),
            x=OperandLayoutMove(("l",), "features"),
            w=OperandLayoutMove(("i", "j"), "in"),
            rows=("i", "j"),
        ),
        embedding=SchemeLookup(
            vocabulary=("l",),
            features=("i", "j"),
            w=OperandLayoutMove(("i", "j"), "in"),
            y=OperandLayoutMove(("l",), "features"),
        ),
        stream=("l",),
        inner=("j",),
        rows=("i", "j"),
        inner_rows=("i", "l"),
    )
