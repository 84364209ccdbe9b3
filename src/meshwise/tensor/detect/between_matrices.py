"""Find the modules between the matrices of an attention: norms of heads, numbers for each head."""

from __future__ import annotations

import re

from torch import nn

from meshwise.tensor.core.part import Part
from meshwise.tensor.detect.attention_heads import AttentionHeads
from meshwise.tensor.detect.norm_modules import as_norm

_OF_QUERY_OR_KEY = re.compile(r"(^|_)(q|k|query|key)(_|$)")


def between(
    owner: nn.Module, *, name: str, heads: AttentionHeads, grain: int, shared: bool
) -> tuple[dict[str, Part], dict[str, str]]:
    """Return the parts of what the module with that name holds beside its matrices, and why something gets none, by
    name.

    `grain`: features that stay on one rank; `shared`: two ranks may hold the same key head.
    """
    found: dict[str, Part] = {}
    for inner_name, module in owner.named_modules(prefix=name):
        if isinstance(module, nn.Embedding) and module.embedding_dim == heads.count:
            found[inner_name] = Part("inner", grain=grain // heads.width)
        elif norm := as_norm(module):
            if norm[0] == heads.width:
                found[inner_name] = Part("each_head")
            elif _OF_QUERY_OR_KEY.search(inner_name.rpartition(".")[2]) and norm[0] in (heads.features, heads.keys):
                keys = norm[0] < heads.features
                found[inner_name] = Part(
                    "norm",
                    norm=norm[1],
                    inner=True,
                    grain=heads.width if keys else grain,
                    shared=keys and shared,
                )
    unclear: dict[str, str] = {}
    for inner_name, parameter in owner.named_parameters(recurse=False, prefix=name):
        dims = [dim for dim, size in enumerate(parameter.shape) if size == heads.count]
        if len(dims) == 1 and set(parameter.shape[dims[0] + 1 :]) <= {1, heads.width}:
            found[inner_name] = Part("inner", grain=grain // heads.width, dim=dims[0] - parameter.dim())
        elif dims:
            unclear[inner_name] = "which of its dims counts heads does not show; rule: 'inner' when the last does"
    return found, unclear
