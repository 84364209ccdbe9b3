"""Unusual models and batches, trained by `parallelize` as by one process: loss, norm, every
gradient and every parameter of all steps to 1e-9.

Skips, changes in place, frozen stages, recomputation, functions with a backward of their own, layers that run twice,
values that are no tensors, noise, odd batches; and an exception on any stage."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan, PlanError
from meshwise.testing import agree, run
from pipeline.training import (
    BOUND,
    WIDTH,
    Chain,
    images,
    linears,
    made,
    numbers,
    squares,
    trainer,
    trains_like_one,
)
from reference.convolutional import ResNet, UNet

# ---- what a forward may do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["pp=3 microbatches=2", "pp=2 dp=2 zero=3 microbatches=2 schedule=zb-h1"])
def test_skips_over_stages(plan: str) -> None:
    trains_like_one(made(UNet), plan, images(6, 3, 4))


def test_a_resnet_cut_within_its_blocks() -> None:
    trains_like_one(made(ResNet), "pp=4 microbatches=4 schedule=looped virtual_stages=2", images(6, 5, 1))


class InPlace(nn.Module):
    """Changes its input, and the model changes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(0.5).relu_()).add_(x)
        return out


class ChangesBetween(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
            x *= 2
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_changes_in_place_at_every_edge(schedule: str) -> None:
    model = made(lambda: ChangesBetween(*(InPlace() for _ in range(4))))
    trains_like_one(model, f"pp=4 microbatches=3 schedule={schedule}", numbers(6, 5, 4))


class ChangesItsBatch(Chain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.clamp_(min=0.0).add_(1.0))


@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 microbatches=2 schedule=looped virtual_stages=2"])
def test_each_stage_has_its_own_copy_of_a_batch_that_is_changed_in_place(plan: str) -> None:
    trains_like_one(made(lambda: ChangesItsBatch(*linears())), plan, numbers(4, 3))


class Doubled(torch.autograd.Function):
    """A function with a backward of its own, which needs what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 2 * gradient * x.cos()


class WithDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(self.linear(x))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h2"])
def test_a_backward_of_ones_own_is_what_is_run(schedule: str) -> None:
    model = made(lambda: Chain(*(WithDoubled() for _ in range(3))))
    trains_like_one(model, f"pp=3 microbatches=4 schedule={schedule}", numbers(8, 4, 5))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.theta  # type: ignore[operator]


class WithRotary(nn.Module):
    """Holds a module with a buffer that all blocks share, as the attentions of torchtune."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.linear, self.rotary = nn.Linear(WIDTH, WIDTH), rotary

    def forward(self, x: Tensor) -> Any:
        return self.rotary(self.linear(x))


@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 microbatches=2 schedule=looped virtual_stages=2"])
def test_a_buffer_in_a_module_that_all_blocks_share(plan: str) -> None:
    rotary = Rotary()
    trains_like_one(made(lambda: Chain(*(WithRotary(rotary) for _ in range(4)))), plan, numbers(4, 3))


class Twice(nn.Module):
    """One layer on both ends, and noise that the model draws by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.ModuleList(linears())

    def forward(self, x: Tensor) -> Any:
        x = self.shared(x)
        for layer in self.middle:
            x = layer(x) + 0.1 * torch.rand_like(x) * self.training
        return self.shared(x)


@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=3 dp=2 zero=2 microbatches=2 schedule=zb-h1"])
def test_a_layer_that_runs_on_two_stages_and_noise_between_layers(plan: str) -> None:
    trains_like_one(made(Twice), plan, numbers(8, 4, 4))


# ---- what is trained ----------------------------------------------------------------------------------------------


FROZEN: tuple[tuple[int, ...], ...] = ((0,), (1,), (3,), (0, 1), (1, 2), (0, 1, 2))


@pytest.mark.grid(Grid({"schedule": ("1f1b", "zb-h1"), "frozen": FROZEN}, strength=1))
def test_frozen_stages_at_the_beginning_in_the_middle_and_at_the_end(schedule: str, frozen: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        layers = linears(4)
        for index in frozen:
            layers[index].requires_grad_(False)
        return Chain(*layers)

    trains_like_one(made(build), f"pp=4 microbatches=2 schedule={schedule}", numbers(4, 3, 4))


def without_vanishing_gradients(blocks: int = 1) -> nn.Module:
    """A bias before a norm over the batch has a gradient of rounding alone, and Adam makes whole steps of that."""
    model = ResNet(blocks, norm=nn.BatchNorm2d)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = None
    return model


@pytest.mark.parametrize("plan", ["pp=2", "pp=2 dp=2 zero=2 partition=params"])
def test_norms_over_the_batch_are_of_the_rows_of_all_ranks(plan: str) -> None:
    model = made(without_vanishing_gradients)
    trains_like_one(model, plan, images(4, 5, 4))
    trains_like_one(model.eval(), f"{plan} microbatches=2", images(4, 3, 4))


def test_a_norm_of_a_block_that_another_stage_has_asks_no_rank() -> None:
    """The last stage only asks for the shape of what the blocks before it return."""
    model = made(lambda: without_vanishing_gradients(blocks=2))
    trains_like_one(model, "pp=2 dp=2", images(4, 5), where=CutOptions(at=("head",)))


class Normed(Chain):
    """Has batch norms without parameters between its layers."""

    def __init__(self) -> None:
        super().__init__(*linears())
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, affine=False) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


class Counting(Chain):
    """Counts its forwards in a buffer of its own."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__(*linears())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        output: Tensor = super().forward(x)
        return output * (1.0 + self.steps)


def trained(model: nn.Module, plan: str, batches: list[Tensor], at: tuple[str, ...] = ()) -> list[Any]:
    """What it evaluates to after the steps, and its buffers, of every rank."""

    def main(world: World) -> Any:
        split = trainer(world, plan, model, loss=squares, options=Options(example=batches[0], cut=CutOptions(at=at)))
        steps = [split.step(batch).loss for batch in batches]
        return steps, split.evaluate(batches[:1]).loss, dict(split.full_buffers())

    return run(Plan.parse(plan).mesh().size, main)


@pytest.mark.parametrize("plan", ["pp=4", "pp=2 schedule=looped virtual_stages=2 microbatches=1"])
def test_norms_without_parameters_are_as_on_one_process(plan: str) -> None:
    model, batches = made(Normed), numbers(5, 4)
    (whole,) = trained(model, "dp=1", batches)
    for found in trained(model, plan, batches):
        agree(found, whole, bound=BOUND)


def test_buffers_of_a_block_that_runs_twice_on_a_stage() -> None:
    def build() -> nn.Module:
        twice = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        return Chain(*linears(1), twice, twice, *linears(2))

    (whole,) = trained(made(build), "dp=1", numbers(5, 4))
    for found in trained(made(build), "pp=2", numbers(5, 4), ("layers.3",)):
        agree(found, whole, bound=BOUND)


def test_a_buffer_that_every_stage_would_change_is_refused() -> None:
    with pytest.raises(PlanError, match=r"changes its buffer steps outside of its pieces"):
        trained(made(Counting), "pp=2", numbers(4))


# ---- what crosses, goes in and comes out --------------------------------------------------------------------------


class Carrying(nn.Module):
    """Takes and returns hidden states with other values: integers, a mask, a number, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, mask, depth = state["x"], state["mask"], state["depth"]
        return {"x": x + self.linear(x) * mask, "mask": ~mask, "depth": depth + 1, "none": None, "ids": mask.long()}


class Carries(Chain):
    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "mask": x > 0, "depth": 0}
        for layer in self.layers:
            state = layer(state)
        found: Tensor = state["x"] * state["depth"] + state["ids"]
        return found


def test_values_without_gradients_cross_with_those_that_have_some() -> None:
    trains_like_one(made(lambda: Carries(*(Carrying() for _ in range(3)))), "pp=3 microbatches=2", numbers(4, 3, 4))


class Flagged(Chain):
    def forward(self, x: Tensor, scale: float = 1.0, name: str = "", extra: Any = None) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x) * scale
        return {"out": x, "name": name, "extra": extra}


def test_batches_and_outputs_may_have_other_values() -> None:
    model = made(lambda: Flagged(*linears()))
    batches = [{"x": x, "scale": 0.5, "name": "a", "extra": [x.long(), None]} for x in numbers(4, 3, 5)]
    trains_like_one(model, "pp=2 microbatches=2", batches, loss=lambda out, batch: squares(out["out"], batch))

    def main(world: World) -> Any:
        options = Options(example=batches[0])
        split = trainer(
            world, "pp=2 microbatches=2", model, loss=lambda out, batch: squares(out["out"], batch), options=options
        )
        return split.predict(batches[0])

    expected = model(**batches[0])
    for output in run(2, main):
        assert output["name"] == "a"
        assert output["extra"][1] is None
        agree(output["out"], expected["out"].detach(), bound=1e-12)


@pytest.mark.parametrize(
    "plan", ["pp=2 microbatches=4", "pp=3 microbatches=2 schedule=zb-h1", "pp=2 dp=2 microbatches=3"]
)
def test_odd_batches(plan: str) -> None:
    """Fewer rows than micro-batches, one row, and never as many as the step before."""
    trains_like_one(made(lambda: Chain(*linears())), plan, numbers(5, 1, 7, 2))


def test_lengths_may_differ_from_step_to_step() -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(3, length, WIDTH, generator=generator, dtype=torch.float64) for length in (4, 9, 1, 4)]
    trains_like_one(made(lambda: Chain(*linears())), "pp=2 microbatches=2", batches)


def test_evaluation_draws_nothing_and_leaves_no_gradient() -> None:
    model = made(lambda: Chain(*linears(), nn.Dropout(0.5)))
    (batch,) = numbers(5)

    def main(world: World) -> tuple[float, bool]:
        split = trainer(world, "pp=2 microbatches=2", model, loss=squares, options=Options(example=batch))
        loss = split.evaluate([batch]).loss
        return loss, split.model.training

    expected, count = squares(copy.deepcopy(model).eval()(batch), batch)
    for loss, training in run(2, main):
        agree(loss, float(expected.detach()) / count, bound=1e-12)
        assert training


# ---- what goes wrong ----------------------------------------------------------------------------------------------


class Trap(nn.Module):
    """Fails in its forward, or in its backward, when it meets the number."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward" and (x > 100).any():
            raise LookupError("a number over 100")
        y = self.linear(x)
        if self.where == "backward" and y.requires_grad and (x > 100).any():
            y.register_hook(_fail)
        return y


def _fail(_gradient: Tensor) -> Tensor:
    raise LookupError("a number over 100")


def caught(world: World, stage: int, where: str) -> None:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers[stage] = Trap(where)
    for layer in layers:
        nn.init.eye_(layer.get_submodule("linear").weight if isinstance(layer, Trap) else layer.weight)  # type: ignore[arg-type]
    good, bad = torch.ones(4, WIDTH), torch.ones(4, WIDTH).index_fill(0, torch.tensor([2]), 1000.0)
    split = trainer(world, "pp=3 microbatches=4", Chain(*layers), loss=squares, options=Options(example=good))
    split.step(good)
    split.step(bad)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_is_every_ranks_with_its_own_type(stage: int, where: str) -> None:
    with pytest.raises(LookupError, match="a number over 100"):
        run(3, caught, args=(stage, where))


@pytest.mark.parametrize(
    "build, plan, message",
    [
        (
            lambda: Chain(*linears(3)),
            "pp=8",
            r"8 stages do not fit: Chain has 3 pieces, so at most .*=3",
        ),
        (lambda: nn.Linear(WIDTH, WIDTH), "pp=2", r"2 stages do not fit"),
        (
            lambda: Chain(*linears(3), nn.Dropout()),
            "pp=2 microbatches=3 schedule=interleaved virtual_stages=2",
            "multiple",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_on_every_rank(build: Any, plan: str, message: str) -> None:
    (batch,) = numbers(4)

    def main(world: World) -> str:
        with pytest.raises(PlanError, match=message) as raised:
            trainer(world, plan, made(build), loss=squares, options=Options(example=batch))
        return str(raised.value)

    assert len(set(run(Plan.parse(plan).mesh().size, main))) == 1


def test_a_cut_by_hand_that_names_nothing_is_refused_on_every_rank() -> None:
    (batch,) = numbers(4)

    def main(world: World) -> None:
        options = Options(example=batch, cut=CutOptions(at=("layer.2",)))
        with pytest.raises(PlanError, match=r"cannot begin at 'layer.2'; it can at, for example, layers"):
            trainer(world, "pp=2", made(lambda: Chain(*linears())), loss=squares, options=options)

    run(2, main)
