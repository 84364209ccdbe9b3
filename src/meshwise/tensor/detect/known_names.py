"""Known names of attributes that count heads, and of the few classes that need an entry; and dotted names of modules.

A name here is a convention that several libraries share. A class is here because its forward arranges a fused matrix in
a way that no attribute shows. Classes are written by their full name, so a library that is not installed needs no
import.
"""

import re
from collections.abc import Mapping

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads", "num_head")
"""Names of the number of attention heads, on a module or on its configuration."""

KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""Names of the number of key and value heads, where it is smaller."""

GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "queries_per_kv")
"""Names of the number of heads that share a key head."""

HEAD_WIDTHS = (
    *("head_dim", "head_size", "head_width", "attention_head_size", "key_value_proj_dim", "d_kv", "d_k", "d_head"),
    "dim_head",
)
"""Names of the features of one head."""

FEATURES = (
    *(
        "embed_dim",
        "n_embd",
        "embed_size",
        "emb_dim",
        "d_model",
        "model_dim",
        "dim",
        "width",
        "hidden_size",
        "hidden_dim",
    ),
    *("split_size", "all_head_size", "inner_dim", "attn_dim"),
)
"""Names under which an attention keeps the features of all its heads together."""

CONFIGURATIONS = ("config", "cfg", "args")
"""Names under which modules keep what they were built from."""

BY_HEAD = ("alibi", "position_bias")
"""Names of arguments of an attention that hold something for every head: (heads, …), (rows · heads, …) with three dims,
(1 or rows, heads, …) with four."""

MASKS = ("mask", "bias")
"""Words in the names of masks, and of arguments that are added to scores. One with four dims, (1 or rows, 1 or heads,
…), may hold something for every head."""

STORED_AS_INPUTS_BY_OUTPUTS = ("transformers.pytorch_utils.Conv1D",)
"""Matrices whose weight is (inputs, outputs), and that are otherwise linear layers."""

INTERLEAVED: Mapping[str, str] = {
    "transformers.models.bloom.modeling_bloom.BloomAttention": "query_key_value",
    "transformers.models.falcon.modeling_falcon.FalconAttention": "query_key_value",
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": "query_key_value",
    "transformers.models.persimmon.modeling_persimmon.PersimmonAttention": "query_key_value",
}
"""Attention classes whose fused matrix goes head by head (q, k and v of each head), and the name of that matrix. Any
other fused matrix is all of q, then all of k, then all of v, if its module shows it; see `order_of_fused`."""

DECLARED: Mapping[str, str | None] = {
    "colwise": "colwise",
    "packed_colwise": "colwise",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "each_head",
    "colwise_gather_output": None,
    "embedding_rowwise": None,
}
"""The words of a plan that a transformers model declares, and the parts they are here; None: found by structure."""


_BRANCH = re.compile(r".*?\.\d+(\.[^.]+)?")
"""The name of a block, and of the module in it that is around all others of a pair."""


def enclosing(name: str) -> list[str]:
    """Return the names of the modules that hold `name`, innermost first; the last is "", the model."""
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(len(words) - 1, -1, -1)]


def branch_around(name: str) -> str:
    """Return the name of the child of a block that holds `name`; `name` itself if it is in no block."""
    return match[0] if (match := _BRANCH.match(name)) else name


def of_all_blocks(name: str) -> str:
    """Return the name with `*` for every number: the same for all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def full_name(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"
