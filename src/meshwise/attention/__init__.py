"""Attention over tokens that are split over ranks, and attention under a pattern (sparse attention)."""

from meshwise.attention.mask_pattern import (
    Pattern,
    blocks,
    causal,
    dilated,
    documents,
    fixed,
    full,
    global_tokens,
    padding,
    parse_pattern,
    prefix,
    random_blocks,
    window,
)
from meshwise.attention.split_attention import attend

__all__ = [
    "Pattern",
    "attend",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "full",
    "global_tokens",
    "padding",
    "parse_pattern",
    "prefix",
    "random_blocks",
    "window",
]
