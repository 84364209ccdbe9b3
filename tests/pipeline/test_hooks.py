"""Hooks on a model that is cut into stages do what they do on one process, or are refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from grid import Grid
from hooked_models import Hook, Model, agrees, batch, by_one, by_plan, doubled, hooked, stronger, trainer
from meshwise.comm.api.world import World
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError
from meshwise.testing import run

PLANS = (
    "pp=2 microbatches=4",
    "pp=2 microbatches=4 schedule=zb-h1",
    "pp=2 microbatches=4 schedule=interleaved virtual_stages=2",
    "pp=2 dp=2 zero=3 microbatches=2 recompute=full",
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning", "ignore:Using a non-full backward hook:FutureWarning"
)
over_plans = pytest.mark.parametrize("plan", PLANS)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    for number in range(4):
        yield model.get_submodule(f"body.blocks.{number}")


def ups(model: nn.Module) -> Iterator[nn.Module]:
    yield from (block.get_submodule("up") for block in blocks(model))


HOOKS: dict[str, Hook] = {
    "backward of layers": lambda model: [layer.register_full_backward_hook(doubled) for layer in ups(model)],
    "backward pre of layers": lambda model: [layer.register_full_backward_pre_hook(doubled) for layer in ups(model)],
    "old backward of layers": lambda model: [layer.register_backward_hook(doubled) for layer in ups(model)],
    "backward pre of the model": lambda model: model.register_full_backward_pre_hook(doubled),
    "forward": lambda model: [block.register_forward_hook(lambda _, __, y: y * 0.7) for block in blocks(model)],
    "forward, always": lambda model: [
        block.register_forward_hook(lambda _, __, y: None if y is None else y * 0.7, always_call=True)
        for block in blocks(model)
    ],
    "forward pre with kwargs": lambda model: [
        block.register_forward_pre_hook(lambda _, x, __: (x, {"scale": 0.3}), with_kwargs=True)
        for block in blocks(model)
    ],
    "forward of the model": lambda model: model.register_forward_hook(lambda _, __, y: y * 0.7),
    "parameters": lambda model: [one.register_hook(lambda g: g * 1.5) for one in model.parameters()],
    "accumulated": lambda model: [one.register_post_accumulate_grad_hook(stronger) for one in model.parameters()],
    "weight norm": lambda model: [parametrizations.weight_norm(layer) for layer in ups(model)],
}


@pytest.mark.grid(Grid({"hook": tuple(HOOKS), "plan": PLANS}, strength=1))
def test_hooks_do_what_they_do_on_one_process(hook: str, plan: str) -> None:
    agrees(by_plan(plan, lambda: hooked(HOOKS[hook])), by_one(HOOKS[hook]))


def test_the_hooks_change_the_result() -> None:
    plain = by_one(lambda _model: None)
    for name in ("backward of layers", "backward pre of layers", "parameters", "accumulated"):
        assert abs(by_one(HOOKS[name])[0][1] - plain[0][1]) > 1e-3


@pytest.mark.parametrize("at", ["body.blocks.1", "body.blocks.2.up", "head"])
@pytest.mark.parametrize("name", ["backward of layers", "backward pre of layers"])
def test_hooks_wherever_a_stage_begins(name: str, at: str) -> None:
    if at.endswith("up"):  # no stage begins inside of a block with hooked modules
        with pytest.raises(PlanError, match=re.escape(at)):
            by_plan(PLANS[0], lambda: hooked(HOOKS[name]), cut=CutOptions(at=(at,)))
    else:
        agrees(by_plan(PLANS[0], lambda: hooked(HOOKS[name]), cut=CutOptions(at=(at,))), by_one(HOOKS[name]))


def test_a_hook_on_a_parameter_that_is_taken_off_later_is_off() -> None:
    def main(world: World) -> list[tuple[float, float]]:
        model = Model().double()
        handles = [one.register_hook(lambda g: g * 1.5) for one in model.parameters()]
        handles += [one.register_post_accumulate_grad_hook(stronger) for one in model.parameters()]
        training = trainer(world, PLANS[0], model)
        for handle in handles:
            handle.remove()
        return [(float(step.loss), float(step.grad_norm)) for step in (training.step(batch()) for _ in range(2))]

    agrees(run(2, main), by_one(lambda _model: None))


@pytest.mark.parametrize("name", ["parameters", "accumulated", "forward"])
def test_hooks_put_on_the_stages(name: str) -> None:
    """Of a model of one stage a rank, each rank's has all modules."""

    def late(stage: nn.Module) -> None:
        HOOKS[name](stage)

    agrees(by_plan(PLANS[0], lambda: Model().double(), late=late), by_one(HOOKS[name]))


# ---- refused -------------------------------------------------------------------------------------------------------


def refused(hook: Hook, reason: str, **options: Any) -> None:
    with pytest.raises(PlanError, match=reason):
        by_plan(PLANS[0], lambda: hooked(hook), **options)


@pytest.mark.parametrize("name", ["body", "body.blocks.0", "head"])
def test_backward_hooks_of_pieces_and_around_them(name: str) -> None:
    for register in (
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_backward_hook,
    ):
        refused(
            lambda model, put=register: put(model.get_submodule(name), doubled),  # type: ignore[misc]
            f"{name} has backward hooks, which see no gradient",
        )
