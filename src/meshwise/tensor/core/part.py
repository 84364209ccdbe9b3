"""The part of a module: its role in tensor parallelism, with the sizes that its split needs.

A scheme knows parts, not models: which linear is colwise, which is rowwise, which embedding is the vocabulary's.
`detect` finds the part of each module, by rules or by the model's structure; `core` and `schemes` split it.

    hidden ── norm ── colwise ── inner ── rowwise ── + hidden        a pair: attention or MLP

*Hidden states* run from block to block. *Inner* activations lie between the two linears of a pair: the features of
attention heads, or of an MLP's hidden layer.

    | role        module                                                        input    output
    | colwise     a linear that opens a pair                                    hidden   inner
    | rowwise     a linear that closes it                                       inner    hidden
    | single      a linear without a partner                                    hidden   hidden
    | head        the linear that gives logits                                  hidden   logits, split over the words
    | embedding   an embedding over the vocabulary                              numbers  hidden
    | positions   an embedding that is added (positions, token types)           numbers  hidden
    | patches     a convolution whose output channels become features           input    hidden
    | norm        a LayerNorm or RMSNorm over the features, or inner            hidden   hidden
    | vector      parameters whose last dim is the features, used element by element
    | inner       parameters, or an embedding, with a dim that counts heads
    | each_head   a module that treats every head in the same way (a norm of queries and keys): kept whole
    | attention   the module around a pair, whose attributes count heads
    | pair        the module around a pair, without attributes that count
    | block       a repeated block: with sequence parallelism the tokens are split from the first to the last block
    | whole       computed whole, on the whole features: a classifier, a pooler

A part belongs to a module, or (`colwise`, `rowwise`, `vector`, `inner`) to a parameter that a module holds itself.
"""

from dataclasses import dataclass

import torch
from torch import nn

from meshwise.layout.layout import DimSplit


@dataclass(frozen=True)
class Norm:
    """Formula of a norm."""

    centred: bool
    """LayerNorm subtracts the mean; RMSNorm does not."""
    epsilon: float | None
    """Added to the variance; None is the smallest step of the dtype at 1, as torch's RMSNorm has it."""
    statistics: torch.dtype | None = None
    """The dtype the input is converted to for its statistics; None leaves it (half precision: float32)."""
    offset: float = 0.0
    """Added to the gain: 1 where a norm stores how far its gain is from 1."""
    gain: str = "weight"
    """The name of the parameter that scales; of one that is not there, nothing does."""
    bias: str = "bias"
    """The name of the parameter that is added, likewise."""


@dataclass(frozen=True)
class Part:
    """Role of one module, with its sizes. Fields that the role does not use stay as they are."""

    role: str

    sections: tuple[int, ...] = ()
    """colwise, inner: the sizes of what is fused along the inner dim, such as q, k and v; () is one."""
    grain: int = 1
    """colwise, rowwise, inner, norm: inner features that stay together: those of a head (of all that share a key)."""
    dim: int | None = None
    """inner: the dim of a parameter that counts, from the end (-1); None is the last that is not 1."""
    transposed: bool = False
    """colwise, rowwise, single, head: the weight is stored (in, out), not (out, in)."""
    readers: int = 1
    """colwise: how many matrices read the same input, this one and others, so that it is gathered once. With
    `gathers`: how many there are inside."""
    gathered: bool = False
    """colwise: the enclosing attention or pair has `gathers`, so that the input is there already."""
    gathers: bool = False
    """attention, pair: gather the hidden states at its entry, for all linears that open it, and for a forward that asks
    its input for sizes."""
    narrows: int = 0
    """attention with `gathers`: how many features stay together, if its forward takes the features of its heads from
    the last size of its input. Then the forward gets an input as wide as this rank's heads, its linears a whole one."""
    even_rows: bool = False
    """attention: its forward takes the number of rows from its input, so the pair must have as many rows inside."""
    whole_tokens: bool = False
    """colwise: inside a block, but its input comes from outside of the blocks (an encoder's output)."""
    counts: tuple[tuple[str, int], ...] = ()
    """attention: attributes (a number, or a tuple of them) that count inner things, each with how many of those stay
    together: ("num_heads", 1), ("split_size", head width)."""
    key_counts: tuple[str, ...] = ()
    """attention: attributes that count key heads."""
    group_counts: tuple[str, ...] = ()
    """attention: attributes that count the heads that share a key head."""
    by_head: tuple[str, ...] = ()
    """attention: arguments of its forward that have, or like masks may have, values for every head; `grain` heads stay
    together."""
    heads: int = 0
    """attention with `by_head`: how many heads there are."""
    kv_replicas: int = 1
    """attention: how many ranks hold the same key head, because there are more ranks than key heads."""
    shared: bool = False
    """colwise, norm: it belongs to keys or values that several ranks share. It is not split over these ranks, and its
    gradient is the sum of theirs."""
    becomes: type[nn.Module] | None = None
    """attention: the class that takes over, as a base in front of the module's own; it finds its `SplitContext`
    and its projections as `self.sharding`."""
    norm: Norm | None = None
    """norm: how it normalises."""
    stream: int = 0
    """block: how many features the hidden states have; 0 if a matrix that reads them shows it."""
    whole_features: bool = False
    """block, embedding, single, rowwise: outside of the blocks hidden states have all features; see `detect.rules`.
    head: it returns whole logits, as those are that cross to another stage of a pipeline."""
    elsewhere: bool = False
    """Another stage of the pipeline has its parameters: here it returns what was received, or nothing."""
    inner: bool = False
    """norm: over what lies within a pair, all heads of queries or of keys, which are cut as those are."""

    @property
    def returns_scores(self) -> bool:
        """True if the module may return something for each of its heads besides the hidden states."""
        return self.role == "attention" and self.becomes is None

    @property
    def cut(self) -> DimSplit:
        """Split of the inner dim."""
        return DimSplit(self.sections, self.grain)
