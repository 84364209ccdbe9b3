"""Handle what a model without a head, or one that counts its features, does outside of its blocks.

Under 2d, 2.5d and 3d the stream is split by features. A head of logits reads it like that, and what lies between the
blocks and the head is known to go feature by feature, or has a part. A model that returns its hidden states, or pools
and classifies them, may do anything with them there: concatenate tokens, take a length, or use a size in a view. One
that makes something for all features itself, sines of positions, adds that. So outside of the blocks it is given all
features, as under sequence parallelism it is given all tokens:

    embedding ─ all features ─ block 0 ─ a part … a part ─ last block ─ all features ─ norm, pooler, the caller

The table of the vocabulary and large matrices stay split; what is as small as a vector is kept whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwise.plan import Plan
from meshwise.tensor.core.part import Part

_SPLIT = ("embedding", "single", "rowwise")
_SMALL = ("norm", "positions", "patches", "vector")


def whole_outside(parts: Mapping[str, Part], *, plan: Plan, counts: bool) -> dict[str, Part]:
    """Return the parts of a model, with all features outside of its blocks where it has no head, or `counts` them
    there.
    """
    blocks = tuple(name for name, part in parts.items() if part.role == "block")
    split = any(part.role == "head" for part in parts.values()) and not counts
    if plan.tp_mode == "1d" or not blocks or split:
        return dict(parts)
    inside = tuple(f"{block}." for block in blocks)
    changed = {}
    for name, part in parts.items():
        if part.role == "block" or (part.role in _SPLIT and not name.startswith(inside)):
            changed[name] = dataclasses.replace(part, whole_features=True)
        elif part.role in _SMALL and not name.startswith(inside):
            changed[name] = Part("whole")
    return {**parts, **changed}
