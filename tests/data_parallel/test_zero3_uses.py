"""Test ZeRO-3 with unusual outputs of modules, forwards without gradients, and losses without a gradient."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.forward import Forward, default_forward
from meshwise.testing import agree, run

WIDTH = 8
over_plans = pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 zero=3", "dp=3 zero=3 microbatches=2"])


def squares(output: Any, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def check(
    plan: str,
    build: Callable[[], nn.Module],
    *,
    loss: Callable[[Any, Any], tuple[Tensor, int]] = squares,
    forward: Forward = default_forward,
) -> None:
    """Under the plan the model trains as on one process."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(6, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    for batch in data:
        batch[:, 0] = torch.arange(len(batch)) == 0
    model = build().double()

    def main(world: World) -> Any:
        trainer = parallelize(
            copy.deepcopy(model), plan, world=world, loss=loss, lr=1e-2, options=Options(forward=forward)
        )
        return outcome(trainer, batches=data)

    expected = alone(model, batches=data, loss=loss, lr=1e-2, options=Options(forward=forward))
    for steps in run(int(plan[3]), main):
        agree(steps, expected, bound=1e-9)


# ---- what a module returns -----------------------------------------------------------------------------------------


class Plain:
    """Holds tensors in attributes, some of them deeper, and itself."""

    def __init__(self, hidden: Tensor) -> None:
        self.inner = {"hidden": [hidden]}
        self.itself = self


@dataclass(slots=True)
class Slotted:
    inner: dict[str, list[Tensor]]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = x + self.narrow(torch.tanh(self.wide(x)))
        if self.kind == "closure":
            return lambda: x
        return Plain(x) if self.kind == "plain" else Slotted({"hidden": [x]})


class Blocks(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            returned = block(x)
            x = returned() if callable(returned) else returned.inner["hidden"][0]
        return x


@pytest.mark.parametrize("kind", ["plain", "slotted"])
@over_plans
def test_tensors_in_the_attributes_of_what_a_module_returns(plan: str, kind: str) -> None:
    check(plan, lambda: Blocks(kind))


@pytest.mark.threads("where ranks hold the parameters together, nothing frees one")
def test_tensors_that_nobody_can_find_are_told_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"zero=3.*result.*tuple, list, mapping, dataclass") as caught:
        check("dp=2 zero=3", lambda: Blocks("closure"))
    assert "setStorage" not in str(caught.value)


# ---- how a parameter is used ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The first matrix is used again at the end, in a way its source does not show."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        super().__init__()
        self.use = use
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        return self.use(self.blocks(torch.tanh(self.first(x))), getattr(self, "fir" + "st").weight)


GETTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "T": lambda x, weight: x @ weight.T,
    "mT": lambda x, weight: x @ weight.mT,
    "H": lambda x, weight: x @ weight.H,
    "mH": lambda x, weight: x @ weight.mH,
    "real": lambda x, weight: x @ weight.real,
}


@pytest.mark.parametrize("use", GETTERS.values(), ids=GETTERS.keys())
@over_plans
def test_a_parameter_that_is_used_through_an_attribute(plan: str, use: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(plan, lambda: Tied(use))


def twice(model: nn.Module, batch: Any) -> Any:
    """With gradients, and then again without, as a target."""
    output = model(batch)
    with torch.no_grad():
        target = model(2 * batch)
    return output - target


@over_plans
def test_a_forward_without_gradients_after_one_with_them(plan: str) -> None:
    check(plan, Tied, forward=twice)


# ---- a loss without a gradient -------------------------------------------------------------------------------------


def of_marked_rows(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """A loss of the rows that begin with 1, which the first rank has; a constant on the others."""
    chosen = output[batch[:, 0] == 1]
    return (chosen.square().sum() if len(chosen) else torch.zeros((), dtype=output.dtype)), len(batch)


@over_plans
def test_ranks_whose_loss_has_no_gradient_take_part_all_the_same(plan: str) -> None:
    check(plan, Tied, loss=of_marked_rows)


@over_plans
def test_a_loss_with_the_gradient_of_the_output_for_the_input(plan: str) -> None:
    """As in physics-informed networks: the backward differentiates a gradient, and needs all weights a second time."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            inputs = batch.detach().requires_grad_()
            output = model(inputs)
            [slope] = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return output, slope

    def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        return sum(each.square().sum() for each in output), len(batch)  # type: ignore[return-value]

    check(plan, build, loss=loss, forward=forward)
