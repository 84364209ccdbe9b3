"""Attribute and argument names by which attentions are recognised, and functions of dotted module names.

The names are conventions of several libraries. A few classes are listed too, where no attribute shows how the fused
matrix is arranged. Classes are listed by full name, so that their library need not be installed."""

import re
from collections.abc import Mapping

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads", "num_head")
"""Names of the number of attention heads, on a module or on its configuration."""

KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""Names of the number of key and value heads, if it differs from the number of query heads."""

GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "queries_per_kv")
"""Names of the number of query heads that share a KV head."""

HEAD_WIDTHS = (
    *("head_dim", "head_size", "head_width", "attention_head_size", "key_value_proj_dim", "d_kv", "d_k", "d_head"),
    "dim_head",
)
"""Names of the number of features of one head."""

FEATURES = (
    *("embed_dim", "n_embd", "embed_size", "emb_dim", "d_model", "model_dim", "dim", "width", "hidden_size"),
    *("hidden_dim", "split_size", "all_head_size", "inner_dim", "attn_dim"),
)
"""Names of the number of features of all heads of an attention."""

CONFIGURATIONS = ("config", "cfg", "args")
"""Names of the attribute in which a module keeps its configuration."""

BY_HEAD = ("alibi", "position_bias")
"""Names of attention arguments with values for every head. Arguments of three dims are (heads, …) or (rows · heads, …),
arguments of four dims (1 or rows, heads, …). A row is a sample of the batch."""

MASKS = ("mask", "bias")
"""Words in the names of arguments that are added to attention scores, such as masks. An argument of four dims, (1 or
rows, 1 or heads, …), may have values for every head."""

STORED_AS_INPUTS_BY_OUTPUTS = ("transformers.pytorch_utils.Conv1D",)
"""Classes of linear layers whose weight is stored as (inputs, outputs)."""

INTERLEAVED: Mapping[str, str] = {
    "transformers.models.bloom.modeling_bloom.BloomAttention": "query_key_value",
    "transformers.models.falcon.modeling_falcon.FalconAttention": "query_key_value",
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": "query_key_value",
    "transformers.models.persimmon.modeling_persimmon.PersimmonAttention": "query_key_value",
}
"""Attention classes whose fused matrix has q, k and v head by head, with the name of the matrix. For other classes,
`order_of_fused` looks for evidence that the matrix has all of q, then all of k, then all of v."""

DECLARED: Mapping[str, str | None] = {
    "colwise": "colwise",
    "packed_colwise": "colwise",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "each_head",
    **dict.fromkeys(("colwise_gather_output", "embedding_rowwise", "embedding_colwise", "local_params"), None),
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"), None),
    **dict.fromkeys(("packed_rowwise", "replicate", "all_reduce"), None),
}
"""Role for each word of a transformers model's tensor-parallel plan (`_tp_plan`); None: the structure decides."""


def enclosing(name: str) -> list[str]:
    """Return the names of the modules around `name`, innermost first; the last name is "", which is the model."""
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(len(words) - 1, -1, -1)]


def of_all_blocks(name: str) -> str:
    """Return `name` with `*` for every number, as a pattern for all blocks: "blocks.*.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def full_name(kind: type) -> str:
    """Return the dotted name of a class, with its Python module."""
    return f"{kind.__module__}.{kind.__qualname__}"
