"""Describe the role of a module in tensor parallelism (colwise, rowwise, norm, …), and how its dims may be split.

`tensor/detect/` finds the part of each module, by the user's rules or the model's structure. `tensor/core/` splits
the module, with the layouts that `tensor/tp_schemes.py` has for its role.

    hidden ── norm ── colwise ── inner ── rowwise ── + hidden        a pair: attention or MLP

*Hidden states* are the activations between blocks. *Inner* activations lie between the two linears of a pair: the
features of attention heads, or of an MLP's hidden layer. The *grain* of a dim is the number of features that must stay
on one rank, such as the features of a head."""

from dataclasses import dataclass

import torch
from torch import nn

from meshwise.layout.layout import DimSplit


@dataclass(frozen=True)
class Norm:
    """Formula of a LayerNorm or RMSNorm."""

    centred: bool
    """True if the norm subtracts the mean, as LayerNorm does and RMSNorm does not."""
    epsilon: float | None
    """Number added to the variance; None for `torch.finfo(dtype).eps`, the default of torch's RMSNorm."""
    statistics: torch.dtype | None = None
    """Dtype of the statistics; None for the dtype of the input, or float32 for inputs in half precision."""
    offset: float = 0.0
    """Number added to the stored gain: 1 for a norm that stores gain - 1."""
    gain: str = "weight"
    """Name of the parameter that scales; a norm without this parameter does not scale."""
    bias: str = "bias"
    """Name of the parameter that is added; a norm without this parameter adds nothing."""


@dataclass(frozen=True)
class Part:
    """Role of one module or parameter, and the sizes of its split.

    The docstring of a field begins with the roles that use the field; other roles leave the default."""

    role: str

    sections: tuple[int, ...] = ()
    """colwise, inner: sizes of the tensors fused along the inner dim, such as q, k and v; () for no fusion."""
    grain: int = 1
    """colwise, rowwise, inner, norm: inner features that stay together, such as all heads of one KV head. attention,
    and inner with one number per head: heads that stay together."""
    dim: int | None = None
    """inner: the dim of heads or inner features, from the end (-1); None for the last dim whose size is not 1."""
    transposed: bool = False
    """colwise, rowwise, single, head: True if the weight is stored as (in, out) instead of (out, in)."""
    readers: int = 1
    """colwise: number of matrices that read the same input, which is gathered once for all of them."""
    gathered: bool = False
    """colwise: True if hidden states are gathered at the entry of the enclosing attention. The colwise linears of the
    attention then share one gather, and the attention's forward sees the sizes of the whole input."""
    narrow_grain: int = 0
    """attention with a gathered input, whose forward takes the width of all heads from the last size of this input:
    number of features that stay together. 0 for other attentions. The forward then gets an input as wide as this
    rank's heads, and its linears get the whole input."""
    even_rows: bool = False
    """attention: True if all ranks need equally many rows, because the forward reads the number from its input."""
    whole_tokens: bool = False
    """colwise: True for a matrix in a block with an input from outside of the blocks (an encoder's output)."""
    counts: tuple[tuple[str, int], ...] = ()
    """attention: attributes (a number, or a tuple of numbers) that count heads or features of heads, each with the
    number that stays together: ("num_heads", 1), ("split_size", features of a head)."""
    key_counts: tuple[str, ...] = ()
    """attention: attributes that count KV heads."""
    group_counts: tuple[str, ...] = ()
    """attention: attributes that count the query heads of one KV head."""
    by_head: tuple[str, ...] = ()
    """attention: arguments of its forward that may have a dim of heads, such as masks. `grain` heads stay together."""
    heads: int = 0
    """attention: number of query heads over all ranks, for `by_head`."""
    kv_replicas: int = 1
    """attention: number of ranks that hold the same KV head; more than 1 if there are more ranks than KV heads."""
    shared: bool = False
    """colwise, norm: True for keys or values that several ranks hold (`kv_replicas`). Their gradients are summed."""
    sharded_class: type[nn.Module] | None = None
    """attention: class whose forward replaces the module's own; it becomes the first base class. The forward finds
    `SplitContext` and projections in `self.sharding`. None: the module keeps its forward."""
    norm: Norm | None = None
    """norm: formula of the norm."""
    hidden_width: int = 0
    """block: number of features of the hidden states over all ranks; 0 for other roles."""
    whole_features: bool = False
    """block, embedding, single, rowwise: True if hidden states outside of the blocks have all features on every rank.
    head: True if it returns whole logits, because another stage of a pipeline gets them."""
    on_other_stage: bool = False
    """Any role: True if another stage holds the parameters. The module then returns that stage's tensors, or NaN."""
    summed_from: int | None = None
    """whole: index of an output feature. Each rank uses this feature and all later ones for its own heads alone, so
    their gradients are summed over the ranks. None: no gradients are summed."""
    inner: bool = False
    """norm: True for a norm inside a pair, over all heads of the queries or of the keys; it is split like the heads.
    magnitude, dropout: True if its features are inner ones, which are split."""

    @property
    def cut(self) -> DimSplit:
        """Constraint on the split of the inner dim: `sections` and `grain`."""
        return DimSplit(self.sections, self.grain)
