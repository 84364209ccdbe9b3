"""Dropout and attention with dropout on a GPU by one kernel each way, with the masks of `random_bits`.

A bit of a mask is a function of two 32-bit numbers of its row and one of its column (`MaskNumbers`). The kernels
compute the bits where they need them, in the forward and again in the backward, so no mask is stored. torch.compile
makes the kernels from the functions here, so they need Triton and a C compiler.

Attention with dropout is (P * M) V, with probabilities P = exp(S) / sum(exp(S)) and a mask M. FlexAttention (Dong et
al., arXiv 2412.05496) knows no mask after the softmax, but it returns the logarithm of the sum. So it runs twice. With
10000 subtracted from dropped scores it returns out' and lse', of the kept keys alone. With all scores, and 16 features
of V, it returns lse. Then (P * M) V = out' · exp(lse' - lse)."""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from meshwise.comm.api.streams import gpu_count
from meshwise.model.random_bits import BLOCK, WORD_FACTOR, IndexBlock, largest_kept, mask_numbers

_DROPPED = 10_000.0
_SUMS = AuxRequest(lse=True)
_LEAST_FEATURES = 16
_LEAST_SCORES = 2**21
"""Smaller attentions compute their scores whole, and need not wait for the compiler."""


class MaskNumbers(NamedTuple):
    """The int32 numbers of a mask with `rows` rows: `first` and `factor` (rows, 1), `column` (1, columns).

    An element is kept if its word is at most `most`."""

    first: Tensor
    factor: Tensor
    column: Tensor
    most: int


def numbers_of_masks(part: IndexBlock, *, keys: Sequence[int], keep: float, device: torch.device) -> list[MaskNumbers]:
    """Return the numbers of each key's mask for a slice of a full tensor; the mask keeps with probability `keep`."""
    most = max(-(2**31), largest_kept(keep))
    return [MaskNumbers(*each, most) for each in zip(*mask_numbers(part, keys=keys, device=device), strict=True)]


def _dropped(x: Tensor, first: Tensor, factor: Tensor, column: Tensor, most: int, scale: float) -> Tensor:
    """Return `x` (rows, columns) times `scale` where it is kept, else 0."""
    word = (first ^ column) * WORD_FACTOR
    return torch.where((word ^ (word >> 15)) * factor <= most, x * scale, 0.0)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True if function is _dropped else None)


class _Dropout(torch.autograd.Function):
    """Dropout of (rows, columns) whose backward computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: MaskNumbers, scale: float) -> Tensor:
        """Return dropped `x`, of the same shape."""
        ctx.save_for_backward(*numbers[:3])
        ctx.rest = numbers.most, scale
        out: Tensor = _compiled(_dropped)(x.detach(), *numbers, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x."""
        return _compiled(_dropped)(*gradients, *ctx.saved_tensors, *ctx.rest), None, None


def dropout(x: Tensor, *, numbers: MaskNumbers, probability: float) -> Tensor:
    """Return `x` with elements dropped by `probability`, the others divided by 1 - probability."""
    out: Tensor = _Dropout.apply(x.reshape(numbers.first.numel(), -1), numbers, 1.0 / (1.0 - probability))
    return out.view(x.shape)


def attention(given: Mapping[str, Any], *, numbers: MaskNumbers) -> Tensor:
    """Return scaled_dot_product_attention's result for its arguments by name; `can_attend` must be true of them.

    `numbers`: of the mask of (samples, heads, queries, keys)."""
    query, key, bias = given["query"], given["key"], given.get("attn_mask")
    shape = *query.shape[:3], key.size(2)
    causal = _causal_blocks(shape[2], shape[3], query.device) if given.get("is_causal") else None
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(bias.logical_not(), -math.inf)
    bias = None if bias is None else bias.expand(shape)
    rows = [each.view(shape[:3]) for each in numbers[:2]]
    options = {"scale": given.get("scale"), "enable_gqa": bool(given.get("enable_gqa")), "block_mask": causal}
    values = [query, key, given["value"]]
    keep = 1.0 - given["dropout_p"]
    out: Tensor = _compiled(_attended)(values, rows, numbers.column.view(-1), numbers.most, bias, keep, options)
    return out


def _attended(
    values: Sequence[Tensor],
    rows: Sequence[Tensor],
    column: Tensor,
    most: int,
    bias: Tensor | None,
    keep: float,
    options: Mapping[str, Any],
) -> Tensor:
    """Return the attention of query, key and value; see the formulas at the top of the file."""
    query, key, value = values
    first, factor = rows

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if bias is None else score + bias[b, h, i, j]

    def dropping(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        word = (first[b, h, i] ^ column[j]) * WORD_FACTOR
        kept = (word ^ (word >> 15)) * factor[b, h, i] <= most
        score = biased(score, b, h, i, j)
        return torch.where(kept, score, score - _DROPPED)

    out, some = flex_attention(query, key, value, score_mod=dropping, return_aux=_SUMS, **options)
    few = value[..., :_LEAST_FEATURES]
    _, every = flex_attention(query, key, few, score_mod=biased, return_aux=_SUMS, **options)
    attended: Tensor = out * (torch.exp(some.lse - every.lse) / keep).unsqueeze(-1)
    return attended.to(query.dtype)


@functools.lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, queries, keys, device=str(device))


def can_drop(x: Tensor) -> bool:
    """Return whether `dropout` serves a tensor: on a GPU that has the kernels, and too large for a mask drawn ahead."""
    return x.is_cuda and x.numel() > BLOCK and x.is_floating_point() and has_kernels(x.device)


def can_attend(given: Mapping[str, Any]) -> bool:
    """Return whether `attention` serves these arguments of scaled_dot_product_attention."""
    query, key, value, seen = given["query"], given["key"], given["value"], given.get("attn_mask")
    return (
        query.is_cuda
        and query.dim() == 4
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query[..., 0].numel() * key.size(2) > _LEAST_SCORES
        and min(query.size(-1), value.size(-1)) >= _LEAST_FEATURES
        and min(query.size(2), key.size(2)) > 1
        and (seen is None or not seen.requires_grad)
        and has_kernels(query.device)
    )


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels can be compiled for a GPU; warn if an attempt fails."""
    if not gpu_count() or importlib.util.find_spec("triton") is None:
        return False
    try:
        (numbers,) = numbers_of_masks(IndexBlock((2, 3), (0, 0)), keys=[0], keep=0.5, device=device)
        dropout(torch.ones(2, 3, device=device), numbers=numbers, probability=0.5)
    except Exception as error:  # noqa: BLE001 - of torch's compiler, Triton or the C compiler
        warnings.warn(
            f"torch.compile made no kernel of dropout ({type(error).__name__}: {str(error).strip().splitlines()[0]}); "
            "masks take forty operations instead, and random=local in the plan takes none",
            stacklevel=2,
        )
        return False
    return True
