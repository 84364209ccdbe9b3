"""Scheme 3D: a p x p x p cube (Bian et al., "Maximizing Parallelism", arXiv 2105.14450; Agarwal et al., 1995).

The cube has the axes i, j and l. Every operand is stored in p³ parts, and multiplied or reduced in p² parts. T is the
number of tokens; K and N are features. The two linears of a pair exchange the roles of j and l:

    | colwise  X  T/(i·j), K/l     W  K/(l·i), N/j     gather X over j, W over i; reduce Y over l, scattered on T
    |          Y  T/(i·l), N/j     as X of rowwise
    | rowwise  X  T/(i·l), K/j     W  K/j, N/(l·i)     gather X over l, W over i; reduce Y over j, scattered on T
    |          Y  T/(i·j), N/l     as X of colwise

    | forward of one linear   (T·K + K·N + T·N) / p² elements    backward: as many if operands are kept, else X, W twice
    | forward of one block    (16 b·s·h + 12 h²) / p² elements   7 b·s·h of inputs, 9 b·s·h of outputs, 12 h² of W

In both linears, i splits W along the features of the hidden states, so heads are never cut. Inside a pair the rows of
the batch are split over (i, l). So other tensors with a batch dim, such as an attention mask, must be moved there.

The head is the 2D product with (i, j) as row and l as col. Its rows are the hidden states' rows, so labels fit.
Its logits, the largest tensor of all, are never a partial sum. With a vocabulary of v it gathers h·v/p elements of W;
a product on the cube would reduce b·s·v/p². The embedding's table is stored like the head's weight."""

from meshwise.tensor.core.scheme import OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct


def three_d() -> Scheme:
    """Return the scheme 3D."""
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
