"""torch's fused attention kernels that return the log-sum-exp of the scores, as no public function of torch does.

| device   dtypes              masks   kernel
| CPU      fp32, fp64          yes     flash attention for the CPU
| CUDA     fp16, bf16          no      flash attention (arXiv 2307.08691), of compute capability 8.0 or more
| CUDA     fp16, bf16, fp32    yes     memory-efficient attention (arXiv 2112.05682)

The kernels of CUDA need features, strides and offsets that are multiples of 8 elements. Shapes are as in
`tiled_attention.py`, with equal numbers of heads."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.comm.api.streams import gpu_count, gpu_properties

_aten = torch.ops.aten
_ALIGNED, _ALIGNED_BIAS, _ALIGNED_LSE = 8, 16, 32
_WIDEST_FLASH = 192
"""Most features of a head for which every GPU has a backward of flash attention."""


class AttentionInput(NamedTuple):
    """Folded queries and one run of keys. `mask`: float to add to the scores, -inf for pairs that do not count."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float


class FusedKernel(NamedTuple):
    """Functions of one kernel.

    | forward    returns o and lse; lse of a query without keys is not defined
    | backward   returns the gradients of q, k and v, for the gradient of o, and o and lse of all keys
    | widens     True if the caller must convert half precision to fp32"""

    forward: Callable[[AttentionInput], tuple[Tensor, Tensor]]
    backward: Callable[[AttentionInput, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    widens: bool = False


def fused_kernel(q: Tensor, *, value_features: int, masked: bool) -> FusedKernel | None:
    """Return the fastest kernel for folded queries; None if there is none for their device and dtype."""
    width = q.size(-1)
    if width != value_features:
        return None
    if q.device.type in ("cpu", "meta"):
        return _CPU
    old = q.dtype == torch.bfloat16 and not _has_flash()  # the efficient kernel has no bf16 there
    if q.device.type != "cuda" or width % _ALIGNED or q.dtype == torch.float64 or old:
        return None
    plain_half = q.dtype != torch.float32 and not masked
    return _FLASH if plain_half and width <= _WIDEST_FLASH and _has_flash() else _EFFICIENT


@functools.cache
def _has_flash() -> bool:
    """Return whether the GPUs of this host run flash attention; True without a GPU, for tensors without values."""
    return gpu_count() == 0 or gpu_properties(0).major >= 8


def _cpu_forward(x: AttentionInput) -> tuple[Tensor, Tensor]:
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*x[:3], attn_mask=x.mask, scale=x.scale)
    return o, lse


def _cpu_backward(x: AttentionInput, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    backward, dropout, is_causal = _aten._scaled_dot_product_flash_attention_for_cpu_backward, 0.0, False
    dq, dk, dv = backward(do, *x[:3], o, lse, dropout, is_causal, attn_mask=x.mask, scale=x.scale)
    return dq, dk, dv


def _aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy if its strides or its offset do not suit the kernels of CUDA."""
    suits = x.stride(-1) == 1 and not any(place % _ALIGNED for place in (*x.stride()[:-1], x.storage_offset()))
    return x if suits else x.clone(memory_format=torch.contiguous_format)


def _flash_forward(x: AttentionInput) -> tuple[Tensor, Tensor]:
    found = _aten._scaled_dot_product_flash_attention(*map(_aligned, x[:3]), scale=x.scale)
    return found[0], found[1]


def _flash_backward(x: AttentionInput, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = (x.q.new_empty(size, dtype=torch.uint64) for size in (2, ()))  # read under dropout only
    borders, dropout, is_causal = (None, None, x.q.size(2), x.k.size(2)), 0.0, False
    given = (*map(_aligned, (do, *x[:3], o)), lse.contiguous(), *borders, dropout, is_causal, seed, offset)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(*given, scale=x.scale)
    return dq, dk, dv


def _bias(x: AttentionInput) -> Tensor | None:
    """Return the mask as the memory-efficient kernel takes it: of all samples and heads, with aligned rows."""
    if x.mask is None:
        return None
    keys = x.mask.size(-1)
    rows = functional.pad(x.mask, (0, -keys % _ALIGNED_BIAS)).narrow(-1, 0, keys) if keys % _ALIGNED_BIAS else x.mask
    return rows.expand(*x.q.shape[:3], keys)


def _efficient_forward(x: AttentionInput) -> tuple[Tensor, Tensor]:
    given, with_lse = map(_aligned, x[:3]), True
    o, lse, *_ = _aten._scaled_dot_product_efficient_attention(*given, _bias(x), with_lse, scale=x.scale)
    if x.mask is not None:
        o = o.masked_fill((x.mask == -math.inf).all(-1, keepdim=True), 0.0)
    return o, lse.narrow(-1, 0, x.q.size(2))  # the kernel pads the rows of lse


def _efficient_backward(x: AttentionInput, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = (x.q.new_empty((), dtype=torch.int64) for _ in range(2))  # read under dropout only
    filled = functional.pad(lse, (0, -lse.size(-1) % _ALIGNED_LSE), value=math.inf).contiguous()
    # The kernel reads o with the strides of (samples, queries, heads, features).
    by_queries = o.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    dropout, wanted = 0.0, [True, True, True, False]
    given = (*map(_aligned, (do, *x[:3])), _bias(x), by_queries, filled, seed, offset, dropout, wanted)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(*given, scale=x.scale)
    return dq, dk, dv


_CPU = FusedKernel(_cpu_forward, _cpu_backward, widens=True)
_FLASH = FusedKernel(_flash_forward, _flash_backward)
_EFFICIENT = FusedKernel(_efficient_forward, _efficient_backward)
