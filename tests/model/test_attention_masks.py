"""Attention with a dropout probability close to 0 equals torch's attention without dropout, under every mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.drawing_models import Calling, drawn, numbers

NEXT_TO_NOTHING = 1e-15
HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1) | torch.tensor([True, False, False, False, False])  # the first: all
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "booleans": ~HIDDEN,
    "numbers": torch.zeros(5, 5, dtype=torch.float64).masked_fill(HIDDEN, -math.inf),
    "a row": torch.tensor([[True, False, True, True, True]]),
    "of each sample": numbers(3, 1, 5, 5),
    "of each head": numbers(1, 2, 5, 5) > 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}], ids=["plain", "scale", "groups"])
def test_the_function_takes_masks_as_torch_does(mask: str, options: dict[str, Any]) -> None:
    q, k = numbers(3, 2, 5, 4), numbers(3, 1 if options.get("enable_gqa") else 2, 5, 4)

    def attended(dropout_p: float) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, k, MASKS[mask], dropout_p, **options)

    dropping = drawn(Calling(lambda _: attended(NEXT_TO_NOTHING)), q)
    torch.testing.assert_close(dropping, attended(0.0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("mask", ["none", "booleans", "numbers"])
def test_the_module_takes_masks_as_torch_does(mask: str, padding: bool, weights: bool) -> None:
    """With both masks, the first query of the first sample sees nothing: torch gives it zeros, NaN with weights."""
    given = MASKS[mask]
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[0, 0] = True
    if mask == "numbers":
        hidden = torch.zeros(3, 5, dtype=torch.float64).masked_fill(hidden, -math.inf)
    options = {
        "key_padding_mask": hidden if padding else None,
        "attn_mask": ~given if given is not None and given.dtype is torch.bool else given,
        "need_weights": weights,
    }
    x = numbers(3, 5, 8)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    expected = module(x, x, x, **options)
    module.dropout = NEXT_TO_NOTHING
    found = drawn(Calling(lambda x: module(x, x, x, **options)), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14, equal_nan=True)


def test_a_mask_of_integers_is_refused_as_torch_refuses_it() -> None:
    q = numbers(3, 2, 5, 4)
    attention = Calling(lambda q: functional.scaled_dot_product_attention(q, q, q, HIDDEN.long(), NEXT_TO_NOTHING))
    with pytest.raises(RuntimeError, match="attn_mask dtype to be bool"):
        drawn(attention, q)


def test_autocast_makes_the_same_of_it() -> None:
    q = numbers(3, 2, 5, 4).float()

    def attended(dropout_p: float) -> Tensor:
        return functional.scaled_dot_product_attention(q, q.bfloat16(), q, dropout_p=dropout_p)

    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        dropping, expected = drawn(Calling(lambda _: attended(NEXT_TO_NOTHING)), q), attended(0.0)
    assert dropping.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(dropping, expected)
