"""Test hooks on parameters, registered before and after `parallelize`, on given modules and on deferred models."""

import pytest
import torch
from torch import nn

from hooked_models import Hook, Model, agrees, batch, by_one, by_plan, hooked, loss, stronger
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import run
from meshwise.verify import verify

PLANS = (
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=3 microbatches=2 recompute=full",
    "pp=2 microbatches=2",
)
HOOKS: dict[str, Hook] = {
    "arriving": lambda model: [one.register_hook(lambda g: g * 1.5) for one in model.parameters()],
    "accumulated": lambda model: [one.register_post_accumulate_grad_hook(stronger) for one in model.parameters()],
}
over_plans = pytest.mark.parametrize("plan", PLANS)
over_hooks = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)


@over_plans
@over_hooks
def test_of_a_model_that_is_given(hook: Hook, plan: str) -> None:
    agrees(by_plan(plan, lambda: hooked(hook)), by_one(hook))


@over_plans
@over_hooks
def test_of_a_model_that_is_born(hook: Hook, plan: str) -> None:
    agrees(by_plan(plan, lambda: lambda: hooked(hook)), by_one(hook))


@over_plans
@over_hooks
def test_put_on_later(hook: Hook, plan: str) -> None:
    """One on what was accumulated sees it before the engine takes it."""
    agrees(by_plan(plan, lambda: Model().double(), late=hook), by_one(hook))


@over_plans
def test_one_that_takes_the_gradient_away_is_refused(plan: str) -> None:
    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    def hook(model: nn.Module) -> None:
        model.get_parameter("head.bias").register_post_accumulate_grad_hook(take)

    with pytest.raises(ValueError, match=r"a hook on head\.bias has set its \.grad to None"):
        by_plan(plan, lambda: hooked(hook))


@over_hooks
@pytest.mark.parametrize("plan", ["dp=2 zero=2", "pp=2"])
def test_verify_compares_with_them(hook: Hook, plan: str) -> None:
    def main(world: World) -> bool:
        return verify(hooked(hook), loss, [batch()], plan, world=world, lr=0.05).ok

    assert all(run(2, main))


@pytest.mark.parametrize("plan, in_place", [("dp=1", "010"), ("dp=2 zero=2", "000"), ("pp=2", "011")])
def test_autograd_adds_to_accumulated_gradients_in_place(plan: str, in_place: str) -> None:
    """Not in a first micro-batch nor before a reduction in the backward, nor where a hook reads `.grad`."""

    def main(world: World) -> dict[str, str]:
        options = Options(example=batch())
        trainer = parallelize(
            Model().double(), f"{plan} microbatches=3", loss=loss, world=world, options=options, lr=0.05
        )
        found: dict[str, str] = {}

        def note(name: str, parameter: torch.Tensor) -> None:
            seen = int(parameter.grad is not None)
            found[name] = found.get(name, "") + str(seen)

        for name, parameter in trainer.model.named_parameters():
            parameter.register_hook(lambda _, name=name, one=parameter: note(name, one))
            if name.endswith("bias"):
                parameter.register_post_accumulate_grad_hook(lambda _: None)
        trainer.step(torch.cat([batch(), batch()[:1]]))
        return found

    for found in run(Plan.parse(plan).mesh().size, main):
        assert {key.endswith("bias"): seen for key, seen in found.items()} == {False: in_place, True: "000"}


def test_a_hook_on_a_parameter_that_is_frozen_since() -> None:
    def hook(model: nn.Module) -> None:
        HOOKS["accumulated"](model)
        model.get_parameter("head.bias").requires_grad = False

    agrees(by_plan("pp=2 microbatches=2", lambda: hooked(hook)), by_one(hook))
