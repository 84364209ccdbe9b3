"""Whether what a pair does between its matrices keeps features apart, which is what lets ranks share them out.

Sizes and the order of registration tell which matrices form a pair, and nothing of what the forward does between them:
a softmax or a norm over the hidden features needs all of them. So the module is asked. A copy of it, in which its first
matrices give random numbers, is run again with other numbers in the second half of the features, and what its second
matrix reads in the first half has to stay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_TOKENS = 2


class _Gives(nn.Module):
    """A matrix that gives these numbers, whatever it reads."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, _x: Tensor) -> Tensor:
        return self.numbers


class _Takes(nn.Module):
    """A matrix that remembers what it has read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.read: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.read = x
        return x.new_zeros(*x.shape[:-1], self.width)


def mixes_features(module: nn.Module, *, firsts: Mapping[str, int], second: str, sizes: tuple[int, int]) -> bool:
    """Whether a module that reads the stream is seen to mix what its children `firsts` give before `second` reads it.

    `firsts`: how often each writes all hidden features; `sizes`: of the hidden features, of the stream. False, too, for
    a module whose forward takes something else, or is not the same every time.
    """
    hidden, width = sizes
    generator = torch.Generator("cpu").manual_seed(0)
    given = {
        name: torch.randn(1, _TOKENS, count, hidden, generator=generator, dtype=torch.float64, device="cpu")
        for name, count in firsts.items()
    }
    other = {name: numbers.clone() for name, numbers in given.items()}
    for numbers in other.values():
        numbers[..., hidden // 2 :].neg_()
    one, again, changed = (_read(module, numbers, second=second, width=width) for numbers in (given, given, other))
    if one is None or again is None or changed is None or not torch.equal(one, again) or one.size(-1) != hidden:
        return False
    return not torch.allclose(one[..., : hidden // 2], changed[..., : hidden // 2], rtol=1e-12, atol=1e-12)


def _read(module: nn.Module, given: Mapping[str, Tensor], *, second: str, width: int) -> Tensor | None:
    """What the second matrix reads when the first ones give these numbers, (1, tokens, sections, hidden)."""
    takes = _Takes(width)
    stubs = {**{name: _Gives(numbers.flatten(2)) for name, numbers in given.items()}, second: takes}
    try:
        asked = copy.copy(module)
        asked.training = False
        asked._modules = {
            name: stubs[name] if name in stubs else copy.deepcopy(child) for name, child in module.named_children()
        }
        for name, child in asked.named_children():
            if name not in stubs:
                child.eval()
        with torch.no_grad():
            type(module).forward(asked, torch.zeros(1, _TOKENS, width, dtype=torch.float64, device="cpu"))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError):
        return None  # it takes something else
    return takes.read
