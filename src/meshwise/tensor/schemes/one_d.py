"""1D: each matrix split over tp, in pairs (Shoeybi et al., "Megatron-LM", arXiv 1909.08053).

The first linear of a pair is split by columns, the second by rows; only the end of a pair needs the other ranks:

    X whole ── colwise W/out ── inner/features ── rowwise W/in ── sum over tp ── whole

Communication of a block of two pairs, b·s tokens of h features: 2 all-reduces of b·s·h elements in the forward and 2 in
the backward. With `sequence` the hidden states are split over the tokens (Korthikanti et al., arXiv 2205.05198). Each
of those all-reduces becomes a reduce-scatter and an all-gather of b·s·h, the same traffic, and tensors between pairs
take 1/tp of the memory. The backward gathers X once more for the gradient of W unless it is kept.

Outside of the pairs: the embedding and the head split the vocabulary; one all-reduce of b·s·h each, the embedding's in
the forward and the head's in the backward.
"""

from meshwise.tensor.core.scheme import OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct

_TP = ("tp",)


def one_d(*, sequence: bool) -> Scheme:
    """`sequence`: the tokens of the hidden states are split over tp."""
    stream = OperandLayoutMove(_TP, "tokens" if sequence else "none")
    return Scheme(
        colwise=SchemeProduct(out=_TP, within=(), x=stream),
        rowwise=SchemeProduct(out=(), within=_TP, y=stream, rows=_TP if sequence else ()),
        head=SchemeProduct(out=_TP, within=(), x=OperandLayoutMove(_TP, "none")),
        embedding=SchemeLookup(vocabulary=_TP, features=(), w=OperandLayoutMove(), y=OperandLayoutMove(_TP, "none")),
        stream=(),
        inner=_TP,
        tokens=_TP if sequence else (),
    )
