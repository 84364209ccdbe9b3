"""Keep the outputs of the slow operations that `recompute=selective` does not compute again.

Most bytes that a block saves for its backward are cheap to compute: the scores, softmax and dropout of attention,
norms, activation functions. Most of its time goes into products with weights, whose outputs are comparatively small
(Korthikanti et al., arXiv 2205.05198, section 4). So the outputs of the operations in `KEPT` are kept, and all other
operations are computed again:

    kept        mm  addmm  linear  convolution            products with weights; in split layers, after the reduction
                scaled_dot_product_…                      fused attention: its output and a number per query, no scores
    repeated    bmm  softmax  dropout  gelu  norm  …      in unfused attention, bmm computes scores: large, but cheap

In a transformer block of width h with dropout and unfused attention, 9 h numbers per token are kept besides the input.
They are 3 h of queries, keys and values, h of the attention's projection, and 4 h and h of the MLP (as in GPT-3).
"""

import contextlib
from typing import Any

import torch

from meshwise.base.tensor_tree import tensors
from meshwise.memory.recompute_cost import DeviceTimer
from meshwise.model.forward_replay import ForwardReplay
from meshwise.model.torch_private import TorchDispatchMode

_NAMES = """
    mm addmm linear convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
"""
KEPT = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Schema names of the operations whose outputs are kept."""


class SavedOperations(TorchDispatchMode):
    """Mode that keeps the outputs of the operations in `KEPT`, or takes them from `recall` in a repeated forward.

    The autograd functions of `tensor/core` call `recall.once` themselves for the products inside them.
    """

    def __init__(self, recall: ForwardReplay, *, clock: DeviceTimer | None = None) -> None:
        """`clock` measures the seconds of the operations in `KEPT`; None measures nothing."""
        super().__init__()
        self._recall = recall
        self._clock = clock or contextlib.nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in KEPT and torch.is_grad_enabled():
            with self._clock:
                return self._recall.once(lambda: func(*args, **kwargs))
        if schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors(given.get(argument.name)):
                        self._recall.protect(tensor)
        return func(*args, **kwargs)
