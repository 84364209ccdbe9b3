"""What a repeated forward saves is compared with what the first saved where both wrote it, and made of the same."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.memory.recompute import Block, RecomputeError
from meshwise.model.recall import Recall


def test_what_a_norm_saves_of_its_running_statistics_is_found_again() -> None:
    """An instance norm saves copies of them, one for each row of the batch, and changes them afterwards."""
    norm, x = nn.InstanceNorm1d(4, track_running_stats=True), torch.randn(2, 4, 6, requires_grad=True)
    plain = copy.deepcopy(norm)
    Block(norm, name="norm", mode="full", recall=Recall())
    for _ in range(2):
        (found,), (expected,) = (torch.autograd.grad(one(x).exp().sum(), [x]) for one in (norm, plain))
        assert torch.equal(found, expected)
        assert all(map(torch.equal, norm.buffers(), plain.buffers()))


def test_bytes_that_nobody_wrote_to_may_differ() -> None:
    """As those of the workspace that a kernel saves."""
    workspaces = iter((torch.zeros(9, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8)))

    class Working(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, next(workspaces))
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x: Tensor = ctx.saved_tensors[0]
            return gradient * x.cos()

    class Recurrent(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Working.apply(x)

    module, x = Recurrent(), torch.randn(3, requires_grad=True)
    Block(module, name="recurrent", mode="full", recall=Recall())
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


def test_a_block_that_fills_the_cache_it_is_handed_is_told_to_do_without_it() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Caching(nn.Module):
        def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
            cache = Cache() if past_key_values is None else past_key_values
            cache.seen.append(x)
            return torch.cat(cache.seen).exp()

    module, x = Caching(), torch.ones(2, 4, requires_grad=True)
    Block(module, name="layers.0", mode="full", recall=Recall())
    module(x).sum().backward()
    with pytest.raises(RecomputeError, match=r"layers\.0 saved .* a cache, past_key_values.*use_cache=False") as told:
        module(x, past_key_values=Cache()).sum().backward()
    assert "recomputed=" not in str(told.value)
