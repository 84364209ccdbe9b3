"""Draws have the distribution of torch's draws: mean and spread agree over many samples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.drawing_models import FORMS, Calling, drawn

SAMPLES = 4096


def into(draw: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """What a draw writes into a tensor that it is handed."""
    target = torch.full_like(given[0], 7.0)
    draw(*given, out=target)
    return target


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, train=True)[0],
    "native_dropout, by default": lambda x: torch.native_dropout(x, 0.4, None)[0],
    "native_dropout of nothing": lambda x: torch.native_dropout(x, 0.4, train=False)[0],
    "bernoulli into": lambda x: into(torch.bernoulli, x.sigmoid()),
    "normal into": lambda x: into(torch.normal, x, x.abs()),
    "bernoulli_ of booleans": lambda x: torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.3),
    "uniform_ of halves": lambda x: torch.empty_like(x, dtype=torch.float16).uniform_(-2, 3),
    "hard gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("form", [*FORMS, *OTHERS])
def test_mean_and_spread_are_torchs(form: str) -> None:
    draw = {**FORMS, **OTHERS}[form]
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).expand(SAMPLES, 16).contiguous()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = draw(x)
    ours = drawn(Calling(draw), x)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    ours, theirs = ours.double(), theirs.double()
    spread = theirs.std(0)
    error = spread / SAMPLES**0.5  # of a mean over the samples; of the spread it is about as much
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 6 * error + 1e-12).all()
    assert ((ours.std(0) - spread).abs() <= 12 * error + 1e-12).all()


@pytest.mark.parametrize("kind", [torch.distributions.Gamma, torch.distributions.Beta])
def test_draws_left_to_torch_are_a_warning(kind: Callable[[Tensor, Tensor], torch.distributions.Distribution]) -> None:
    with pytest.warns(UserWarning, match="torch's own generator"):
        drawn(Calling(lambda x: kind(x, x).rsample()), torch.ones(3, 4))
