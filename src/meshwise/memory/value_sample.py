"""Compare a recomputed tensor with the original, by some of its elements.

The first backward of a block checks what its repeated forward saves. A forward that draws from numpy, or reads changed
state, gives other values, and gradients made of them would be silently wrong. Sums in another order, as some GPU
kernels make them, round to other bits and may break near ties differently. So a few elements may differ, each by a
little.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwise.model.dispatch_modes import unseen

_ELEMENTS = 64
_FEW = 1 / 16
_LITTLE = 0.05
"""Of the largest element."""


def glance(tensor: Tensor) -> Tensor | None:
    """Return some elements, evenly spread; None of a tensor that has no values, or not where its shape says.

    Byte tensors are not compared: they are the workspace of a kernel (an LSTM on a CPU saves one), which may have
    written only a part of it.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_meta or tensor.dtype == torch.uint8:
        return None
    with unseen():  # it is no operation of the model
        values, count = tensor.detach(), tensor.numel()
        if count <= _ELEMENTS:
            return values.flatten().clone()
        places = torch.arange(_ELEMENTS, device=tensor.device) * (count - 1) // (_ELEMENTS - 1)
        return values[torch.unravel_index(places, tensor.shape)]


def is_alike(tensor: Tensor, *, before: Tensor) -> bool:
    """Return whether a tensor can be the one that was glanced at."""
    now = glance(tensor)
    assert now is not None
    kind = torch.complex128 if before.is_complex() else torch.float64
    one, other = before.to(kind), now.to(kind)
    finite = one.abs()[one.isfinite()]
    most = float(finite.max()) if finite.numel() else 0.0
    differ = ~torch.isclose(one, other, rtol=0.0, atol=_LITTLE * most, equal_nan=True)
    return int(differ.sum()) <= _FEW * before.numel()
