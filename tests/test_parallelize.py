"""Test which arguments `parallelize` accepts, which it refuses, and its error messages."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.model.forward import default_forward
from meshwise.plan import PlanError
from meshwise.testing import agree, run


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.shape[0]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def on_ranks(size: int, model: Callable[[], nn.Module], plan: str = "dp=auto", **settings: Any) -> None:
    def main(world: World) -> None:
        parallelize(model, plan, world=world, **{"loss": squares, "lr": 1e-2, **settings})

    run(size, main)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_norm_of_zero_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=rf"clip_norm={clip}; give a norm above 0, or None"):
        on_ranks(1, linear, options=Options(clip_norm=clip))


@pytest.mark.parametrize("text", ["", "ignore", "raise:", "raise:1", "skip", "skip:", "skip:0", "skip:-1", "skip:²"])
def test_a_policy_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write 'raise', or 'skip:3' to skip at most 3 such steps in a row"):
        on_ranks(1, linear, options=Options(nonfinite=text))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
def test_a_model_that_is_frozen_as_a_whole_is_refused(plan: str) -> None:
    with pytest.raises(ValueError, match="every parameter is frozen; set requires_grad=True"):
        on_ranks(2, lambda: linear().requires_grad_(requires_grad=False), plan)


@pytest.mark.parametrize(
    "optimizer, reason",
    [
        ("Adafactor", r"rows and columns.*meshwise\.optim\.whole\(Adafactor\)"),
        ("Muon", r"orthogonalises.*meshwise\.optim\.whole\(Muon\)"),
        ("LBFGS", "inner products over the whole model.*AdamW"),
        ("SparseAdam", "sparse gradients.*AdamW"),
    ],
)
@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=1"])
def test_an_optimizer_that_must_see_whole_tensors_is_refused(plan: str, optimizer: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{optimizer} cannot run on slices of parameters: .*{reason}"):
        on_ranks(int(plan[3]), linear, plan, optimizer=getattr(torch.optim, optimizer))


def test_an_optimizer_derived_from_one_that_must_see_whole_tensors_is_refused() -> None:
    class Mine(torch.optim.Muon): ...

    with pytest.raises(ValueError, match=r"Mine, as a kind of Muon, cannot run on slices of parameters: it orth"):
        on_ranks(1, linear, optimizer=Mine)


@pytest.mark.parametrize("optimizer", [functools.partial(torch.optim.SGD, lr=0.1), nn.Linear, "AdamW"])
def test_an_optimizer_that_is_no_optimizer_class_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"is not an optimizer class; pass a class and its arguments"):
        on_ranks(1, linear, optimizer=optimizer)


def test_an_argument_the_optimizer_does_not_take_is_named_with_those_it_does() -> None:
    with pytest.raises(ValueError, match=r"SGD takes no beta, gamma; it takes lr, momentum"):
        on_ranks(1, linear, optimizer=torch.optim.SGD, gamma=1, beta=2)


def test_a_plan_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match="3"):
        on_ranks(2, linear, "dp=3")


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Tanh has no parameters"):
        on_ranks(1, nn.Tanh)


def test_a_function_that_returns_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="the model function returned dict"):
        on_ranks(1, dict)  # type: ignore[arg-type]


# ---- from a batch to the model -------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0))

    def forward(self, features: Tensor, scale: Tensor | float = 1.0) -> Any:
        return self.gain * features * scale


class TakesAll(nn.Module):
    def forward(self, **entries: Tensor) -> Any:
        return torch.stack(list(entries.values())).sum(0)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "model, batch, value",
    [
        (Scaled(), ONE, 3.0),
        (Scaled(), (ONE, 7 * ONE), 3.0),
        (Scaled(), [ONE, 7 * ONE], 3.0),
        (Scaled(), {"features": ONE, "target": 7 * ONE}, 3.0),
        (Scaled(), {"target": 7 * ONE, "scale": 2 * ONE, "features": ONE}, 6.0),
        (TakesAll(), {"a": ONE, "b": 4 * ONE}, 5.0),
    ],
)
def test_the_model_is_called_on_its_part_of_the_batch(model: nn.Module, batch: Any, value: float) -> None:
    assert torch.equal(default_forward(model, batch), value * ONE)


def test_a_mapping_without_an_argument_of_the_model_is_refused_with_both_lists() -> None:
    with pytest.raises(ValueError, match=r"keys \['x', 'y'\].*Scaled\.forward \(features, scale\).*Options\(forward="):
        default_forward(Scaled(), {"y": ONE, "x": ONE})


# ---- from a model to its replicas ----------------------------------------------------------------------------------


class Counted(nn.Module):
    """A layer and a buffer, all of them equal to one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.full((2,), value))
        for parameter in self.layer.parameters():
            nn.init.constant_(parameter, value)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_get_the_initial_values_of_the_first_rank(zero: int) -> None:
    def main(world: World) -> None:
        model = Counted(10.0 + world.rank)
        trainer = parallelize(model, f"dp=3 zero={zero}", world=world, loss=squares, lr=1e-2)
        for name, value in values(trainer).items():
            assert torch.equal(value, torch.full_like(value, 10.0)), name
        assert torch.equal(model.get_buffer("seen"), torch.full((2,), 10.0))
        assert trainer.model is model

    run(3, main)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_function_is_one_model_under_every_plan_and_seeds_differ(zero: int) -> None:
    def main(world: World, plan: str, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(100 + world.rank)  # what a rank drew before does not matter
        return values(parallelize(linear, plan, world=world, loss=squares, lr=1e-2, options=Options(seed=seed)))

    one, other = (run(1, main, args=("dp=1", seed))[0] for seed in (0, 1))
    for parameters in run(3, main, args=(f"dp=3 zero={zero}", 0)):
        agree(parameters, one, bound=0.0)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_a_module_keeps_its_values_whatever_the_seed() -> None:
    def main(world: World) -> None:
        model = linear()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = parallelize(model, "dp=auto", world=world, loss=squares, lr=1e-2, options=Options(seed=9))
        agree(values(trainer), before, bound=0.0)

    run(1, main)


def test_dp_auto_takes_all_ranks() -> None:
    def main(world: World) -> tuple[int | None, list[tuple[int, int]]]:
        trainer = parallelize(linear, "dp=auto zero=1", world=world, loss=squares, lr=1e-2)
        return trainer.plan.dp, [trainer.share(size) for size in (6, 7, 2)]

    assert run(3, main) == [
        (3, [(0, 2), (0, 3), (0, 1)]),
        (3, [(2, 4), (3, 5), (1, 2)]),
        (3, [(4, 6), (5, 7), (2, 2)]),
    ]
