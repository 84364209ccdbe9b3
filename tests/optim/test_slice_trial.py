"""Test that optimizer classes which treat slices and whole parameters differently are refused without `needs`."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.testing import agree, alone, outcome, run
from two_layers import Two, good, squares


class _Stepping(torch.optim.Optimizer):
    """Updates by `lr · change(parameter, gradient)`."""

    def __init__(self, params: Iterable[Any], *, lr: float = 0.1, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.change(p, group["weight_decay"])

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:
        raise NotImplementedError


class Lamb(_Stepping):
    """A step as long as the parameter."""

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:  # noqa: ARG002
        assert p.grad is not None
        step: torch.Tensor = p.grad * (p.norm() / p.grad.norm())
        return step


class RowWise(_Stepping):
    """One number of state per row."""

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:  # noqa: ARG002
        assert p.grad is not None
        return p.grad / p.grad.square().mean(-1, keepdim=True).sqrt()


class DecaysMatrices(_Stepping):
    """Weight decay for matrices only."""

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:
        assert p.grad is not None
        return p.grad + decay * p if p.ndim == 2 else p.grad


class Rows(_Stepping):
    """Works on matrices, and fails on vectors."""

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:  # noqa: ARG002
        assert p.grad is not None
        return p.grad if p.ndim == 1 and len(p) == 5 else p.grad / p.grad.size(1)


class Sign(_Stepping):
    """Elementwise, as Lion is."""

    def change(self, p: nn.Parameter, decay: float) -> torch.Tensor:
        assert p.grad is not None
        return p.grad.sign() + decay * p


class OwnAdamW(torch.optim.AdamW):
    """AdamW under another name."""


def trained(world: World, plan: str, optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> Any:
    trainer = parallelize(Two, plan, world=world, loss=squares, optimizer=optimizer, **arguments)
    return outcome(trainer, batches=[good(), good(1)])


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("optimizer", [Lamb, RowWise, DecaysMatrices])
def test_a_class_that_looks_at_whole_parameters_is_refused(plan: str, optimizer: type[torch.optim.Optimizer]) -> None:
    said = rf"{optimizer.__name__} needs whole parameters.*off by up to \d+%.*optimizer=meshwise\.optim\.whole"
    with pytest.raises(ValueError, match=said):
        run(1 if plan == "dp=1" else 2, trained, args=(plan, optimizer, {"lr": 0.1}))


def test_a_class_that_fails_on_slices_is_refused_with_its_error() -> None:
    with pytest.raises(ValueError, match=r"Rows needs whole parameters.*on slices raised IndexError"):
        run(1, trained, args=("dp=1", Rows, {"lr": 0.1}))


@pytest.mark.parametrize("optimizer, arguments", [(Sign, {}), (OwnAdamW, {}), (DecaysMatrices, {"weight_decay": 0.0})])
def test_elementwise_classes_are_as_on_one_process(optimizer: Any, arguments: dict[str, float]) -> None:
    arguments = {"lr": 0.01, **arguments}
    [first, _] = run(2, trained, args=("dp=2 zero=3", optimizer, arguments))
    single = alone(Two, loss=squares, batches=[good(), good(1)], optimizer=optimizer, **arguments)
    agree(first, single, bound=2e-4)


def test_the_trial_leaves_torchs_generator_as_it_was() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(1, trained, args=("dp=1", Sign, {"lr": 0.01}))
    assert torch.equal(before, torch.get_rng_state())
