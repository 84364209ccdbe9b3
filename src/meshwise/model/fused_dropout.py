"""Compute dropout, and attention with dropout, on a GPU; the kernels compute each bit of the mask and store none.

A bit of a mask is a function of two 32-bit numbers of its row and one of its column (`MaskNumbers`). The kernels
compute bits in forward and backward, so no mask is stored. They need Triton, and a C compiler.

Attention with dropout is (P * M) V, with probabilities P = exp(S) / sum(exp(S)) and a mask M. FlexAttention (Dong et
al., arXiv 2412.05496) knows no mask after the softmax, but it returns the logarithm of the sum. So it runs twice.
Run 1: with 10000 subtracted from dropped scores it returns out' and lse', of the kept keys alone. Run 2: with all
scores, and 16 features of V, it returns lse. Then (P * M) V = out' · exp(lse' - lse)."""

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from meshwise.comm.api.streams import gpu_count, streams_of
from meshwise.model.random_bits import BLOCK, WORD_FACTOR, IndexBlock, largest_kept, mask_numbers
from meshwise.model.torch_private import dispatch_mode_count, function_mode_count

_DROPPED = 10_000.0  # subtracted from a dropped score, so that its exponential is 0
_LEAST_FEATURES = 16
_LEAST_SCORES = 2**21
"""Attentions with at most so many scores run without the kernel, and need not wait for the compiler."""


class MaskNumbers(NamedTuple):
    """The int32 numbers of a mask with `rows` rows: `first` and `factor` (rows, 1), `column` (1, columns).

    An element is kept if its word is at most `most`. `scale`: 1 / probability of keeping, a float64 scalar on
    the device: Triton would pass a Python number as a float32."""

    first: Tensor
    factor: Tensor
    column: Tensor
    most: int
    scale: Tensor


def numbers_of_masks(part: IndexBlock, *, keys: Sequence[int], keep: float, device: torch.device) -> list[MaskNumbers]:
    """Return the numbers of each key's mask for a slice of a full tensor; the mask keeps with probability `keep`."""
    rest = max(-(2**31), largest_kept(keep)), torch.full((), 1.0 / keep, dtype=torch.float64, device=device)
    return [MaskNumbers(*each, *rest) for each in zip(*mask_numbers(part, keys=keys, device=device), strict=True)]


def _dropped(x: Tensor, first: Tensor, factor: Tensor, column: Tensor, most: int, scale: Tensor) -> Tensor:
    """Return `x` (*rows, columns) times `scale` where it is kept, else 0."""
    word = (first ^ column) * WORD_FACTOR
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.where((word ^ (word >> 15)) * factor <= most, x.to(wide) * scale.to(wide), 0.0).to(x.dtype)


def _drop(x: Tensor, numbers: MaskNumbers) -> Tensor:
    if x.is_meta:  # one operation stands for the kernel in a rehearsal (`KernelChoice`)
        return x.clone()
    if not x.is_cuda or dispatch_mode_count():  # a mode sees operations of torch alone
        rows = (*x.shape[:-1], 1)
        return _dropped(x, *numbers._replace(first=numbers.first.view(rows), factor=numbers.factor.view(rows)))
    out: Tensor = _kernels().drop(x, numbers=numbers, factor=WORD_FACTOR)
    return out


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("meshwise.model.dropout_kernel")  # where Triton is installed


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)

    def run(*args: Any) -> Any:  # torch compiles nothing under a mode that sees operations
        return function(*args) if dispatch_mode_count() else compiled(*args)

    return run


class _Dropout(torch.autograd.Function):
    """Dropout whose backward computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: MaskNumbers) -> Tensor:
        ctx.most = numbers.most
        ctx.save_for_backward(*numbers[:3], numbers.scale)
        return _drop(x.detach(), numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, factor, column, scale = ctx.saved_tensors
        return dropout(gradients[0], numbers=MaskNumbers(first, factor, column, ctx.most, scale)), None


def dropout(x: Tensor, *, numbers: MaskNumbers) -> Tensor:
    """Return `x` with the elements dropped that the mask drops, the others multiplied by its scale."""
    out: Tensor = _Dropout.apply(x, numbers)
    return out


def attention(given: Mapping[str, Any], *, numbers: MaskNumbers) -> Tensor:
    """Return scaled_dot_product_attention's result for its arguments by name; `can_attend` must be true of them.

    `numbers`: of the mask of (samples, heads, queries, keys)."""
    query, key, value, bias = given["query"], given["key"], given["value"], given.get("attn_mask")
    if query.is_meta:  # in a rehearsal two fused attentions stand for the two runs of FlexAttention
        twice = [functional.scaled_dot_product_attention(**{**given, "dropout_p": 0.0}) for _ in range(2)]
        return twice[0] * twice[1]
    shape = *query.shape[:3], key.size(2)
    causal = _causal_blocks(shape[2], shape[3], query.device) if given.get("is_causal") else None
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(bias.logical_not(), -math.inf)
    bias = None if bias is None else bias.expand(shape)
    options = {"scale": given.get("scale"), "enable_gqa": bool(given.get("enable_gqa")), "block_mask": causal}
    first, factor = (each.view(shape[:3]) for each in numbers[:2])
    own = numbers._replace(first=first, factor=factor, column=numbers.column.view(-1))
    attended: Tensor = _compiled(_attended)([query, key, value], own, bias, options)
    return attended


def _attended(
    values: Sequence[Tensor], numbers: MaskNumbers, bias: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Return the attention to all keys, with dropout; one graph, so that both runs and what follows start few kernels.

    `numbers`: `first` and `factor` (samples, heads, queries), `column` (keys)."""
    query, key, value = values
    out, kept = _run([query, key, value], numbers, bias, options)
    _, every = _run([query, key, value[..., :_LEAST_FEATURES]], None, bias, options)
    every = every.masked_fill(every == -math.inf, 0.0)  # a query without keys: exp(-inf - 0) is its 0
    return (out * (torch.exp(kept - every) * numbers.scale).unsqueeze(-1)).to(query.dtype)


def _run(
    values: Sequence[Tensor], numbers: MaskNumbers | None, bias: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the attention to the keys that `numbers` keep (None: all), and the log of its sum of exponentials."""

    def score_of(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if bias is None else score + bias[b, h, i, j]
        if numbers is None:
            return score
        first, factor, column, most, _ = numbers
        word = (first[b, h, i] ^ column[j]) * WORD_FACTOR
        return torch.where((word ^ (word >> 15)) * factor[b, h, i] <= most, score, score - _DROPPED)

    query, key, value = values
    out, sums = flex_attention(query, key, value, score_mod=score_of, return_aux=AuxRequest(lse=True), **options)
    assert sums.lse is not None
    return out, sums.lse


@functools.lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, queries, keys, device=str(device))


def can_drop(x: Tensor) -> bool:
    """Return whether `dropout` serves a tensor: on a GPU that has the kernels, and too large for a mask drawn ahead."""
    large = x.is_cuda and x.numel() > BLOCK and x.is_floating_point()
    return large and (x.is_meta or works(_try_dropout, device=x.device))


def can_attend(given: Mapping[str, Any]) -> bool:
    """Return whether `attention` serves these arguments of scaled_dot_product_attention, and no mode must see it."""
    query, key, value, seen = given["query"], given["key"], given["value"], given.get("attn_mask")
    fits = (
        query.is_cuda
        and query.dim() == 4
        and query.dtype == key.dtype == value.dtype != torch.float64
        and query.size(0) == key.size(0) == value.size(0)
        and (query.size(1) == key.size(1) == value.size(1) or bool(given.get("enable_gqa")))
        and query[..., 0].numel() * key.size(2) > _LEAST_SCORES
        and min(query.size(-1), value.size(-1)) >= _LEAST_FEATURES
        and min(query.size(2), key.size(2)) > 1
        and (seen is None or not seen.requires_grad)
    )
    if not fits or query.is_meta:  # a meta tensor on a GPU: in a rehearsal, below modes of its own
        return fits
    return not dispatch_mode_count() and not function_mode_count() and works(_try_attention, device=query.device)


@functools.cache
def works(attempt: Callable[[torch.device], None], *, device: torch.device) -> bool:
    """Return whether the first use of a kernel on a GPU succeeds, in a thread without a forward's modes; else warn."""
    if not gpu_count() or importlib.util.find_spec("triton") is None:
        return False
    try:
        with ThreadPoolExecutor(1, initializer=streams_of(device).select) as thread:
            thread.submit(attempt, device).result()
    except Exception as error:  # noqa: BLE001 - from torch's compiler, Triton or the C compiler, or values differ
        warnings.warn(
            f"the kernel of dropout does not work here ({type(error).__name__}: {str(error).strip().splitlines()[0]}), "
            "so each mask takes forty operations; with random=local in the plan, torch's own dropout runs",
            stacklevel=2,
        )
        return False
    return True


def _try_dropout(device: torch.device) -> None:
    """Raise AssertionError unless torch's plain operations give the same values."""
    (numbers,) = numbers_of_masks(IndexBlock((64, 128), (0, 0)), keys=[0], keep=0.5, device=device)
    x = torch.ones(64, 128, dtype=torch.bfloat16, device=device)
    torch.testing.assert_close(dropout(x, numbers=numbers), _dropped(x, *numbers), rtol=0, atol=0)


def _try_attention(device: torch.device) -> None:
    """Raise AssertionError unless torch's plain operations give the same values and gradients."""
    shape, size = (2, 2, 128, 128), 2 * 2 * 128 * 32
    (numbers,) = numbers_of_masks(IndexBlock(shape, (0, 0, 0, 0)), keys=[0], keep=0.5, device=device)
    x = torch.arange(3 * size, dtype=torch.float32, device=device).mul_(2.4).sin_()
    inputs = [part.view(2, 2, 128, 32).requires_grad_() for part in x.split(size)]
    given = dict(zip(("query", "key", "value"), inputs, strict=True)) | {"is_causal": True}
    query, key, value = inputs
    later = torch.ones(shape[2:], dtype=torch.bool, device=device).triu_(1)
    weights = (query @ key.mT * 32**-0.5).masked_fill(later, -math.inf).softmax(-1)
    kept = _dropped(torch.ones_like(weights).view(-1, shape[3]), *numbers).view(shape)
    outs = attention(given, numbers=numbers), (weights * kept) @ value
    for found, expected in zip(
        *((out, *torch.autograd.grad(out, inputs, query.detach())) for out in outs), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # products may be of TF32
