"""Scheme 1D: each matrix is split over the axis tp (Shoeybi et al., "Megatron-LM", arXiv 1909.08053).

The first linear of a pair is split by columns, the second by rows. Only the ends of a pair communicate:

    X whole ── colwise W/out ── inner/features ── rowwise W/in ── sum over tp ── whole

A block of two pairs with b·s tokens of h features takes 2 all-reduces of b·s·h elements in the forward and 2 in the
backward. With `sequence` the tokens of the hidden states are split (Korthikanti et al., arXiv 2205.05198). Then each
all-reduce becomes a reduce-scatter and an all-gather of b·s·h elements: the same traffic, but tensors between pairs
take 1/tp of the memory. The backward gathers X once more for the gradient of W, unless X is kept.

The embedding and the head split the vocabulary. Each takes one all-reduce of b·s·h elements: the embedding in the
forward, the head in the backward."""

from meshwise.tensor.core.scheme import OperandLayoutMove, Scheme, SchemeLookup, SchemeProduct

_TP = ("tp",)


def one_d(*, sequence: bool) -> Scheme:
    """Return the scheme 1D; with `sequence`, the tokens of the hidden states are split over tp too."""
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
