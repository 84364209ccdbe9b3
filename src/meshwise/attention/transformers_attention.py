"""Let models of transformers call `attend`, with their masks as patterns.

transformers finds the attention and the mask of a model by name, in two registries. Here both get functions named
`meshwise`. The mask is not a tensor but a `Pattern`, translated from transformers' mask functions, so no rank holds a
mask of (tokens, tokens). The functions have no state: `attend` is intercepted by the mode that knows the tokens."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwise.attention.mask_pattern import Combined, Pattern, Restarts, causal, full, padding, window
from meshwise.attention.split_attention import attend

NAME = "meshwise"
"""Name of the attention in transformers' registries."""


def use_attend(module: nn.Module) -> Callable[[], None]:
    """Let every transformers model in `module` call `attend`; return a function that undoes this.

    Raises ValueError for a model of transformers whose attention cannot be replaced."""
    undo = contextlib.ExitStack()
    if "transformers" not in sys.modules:
        return undo.close
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: PLC0415 - of the extra `hf`

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    inner: set[nn.Module] = set()
    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or model in inner:
            continue
        inner.update(model.modules())
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"{type(model).__name__} of transformers has an attention of its own that cannot be replaced; use cp=1"
            )
    return undo.close


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | Tensor | None,
    *_more: Any,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of transformers, as its `sdpa_attention_forward` and `eager` do."""
    if given.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} adds a bias by relative position, which it computes from its own number of "
            "tokens; use cp=1"
        )
    is_causal = given.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = attention_mask if isinstance(attention_mask, Pattern) else None
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if attention_mask is None and is_causal:
        pattern = causal()
    out = attend(
        query,
        key,
        value,
        pattern=pattern,
        mask=mask,
        scale=given.get("scaling"),
        dropout=given.get("dropout", 0.0),
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
        packed=True,
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, q_offset: int = 0, **_given: Any
) -> Pattern:
    """Return the pattern of a mask function of transformers and a mask of padding (samples, tokens)."""
    if isinstance(q_offset, int) and q_offset:
        raise ValueError("a cache with earlier tokens has no form under cp; call the model with use_cache=False")
    pattern = translated(mask_function)
    return pattern if attention_mask is None else pattern & padding(attention_mask)


def translated(function: Callable[..., Any]) -> Pattern:
    """Return a mask function of transformers as a pattern. Raises ValueError for a function that is not known."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inside = dict(zip(function.__code__.co_freevars, cells, strict=True))
    match function.__qualname__.split(".")[0]:
        case "causal_mask_function":
            return causal()
        case "bidirectional_mask_function":
            return full()
        case "and_masks" | "or_masks" as name:
            return Combined(tuple(map(translated, inside["mask_functions"])), every=name == "and_masks")
        case "sliding_window_overlay":
            return window(inside["sliding_window"])  # transformers joins it with the causal mask
        case "sliding_window_bidirectional_overlay":
            return window(inside["sliding_window"] + 1)
        case "packed_sequence_mask_function":
            return Restarts(inside["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return translated(inside["mask_function"])
    raise ValueError(
        f"transformers' mask {function.__qualname__.split('.')[0]} has no pattern here; use cp=1, or a model without it"
    )
