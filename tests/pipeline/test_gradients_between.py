"""A forward that asks for gradients itself: between the pieces of a model as one process gives them, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise import testing
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.cut.model_cut import cut_model
from meshwise.pipeline.cut.partition import CutError
from meshwise.plan import Plan, PlanError
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.rehearsal_subject import RehearsalSubject
from pipeline.training import WIDTH, Chain, linears, made, numbers, squares, trains_like_one


def cubes(x: Tensor, by: Tensor, **how: Any) -> Any:
    return torch.autograd.grad((x * x * x).sum(), by, **how)[0]


class Downhill(Chain):
    """Goes some way down between its layers; `how` the gradient is asked for."""

    def __init__(self, **how: bool) -> None:
        super().__init__(*linears())
        self.how = how

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            x = x - 0.1 * cubes(x, x, **self.how)
        return x


class Penalty(Chain):
    """What it returns depends on the gradient by what each layer returns."""

    def __init__(self) -> None:
        super().__init__(*linears())

    def forward(self, x: Tensor) -> Any:
        penalty = torch.zeros(len(x), 1, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x)
            penalty = penalty + cubes(x, x, create_graph=True).square().mean(-1, keepdim=True)
        return x + penalty


class Inside(nn.Module):
    """A block that asks for a gradient by what it is given, cut off from that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        gradient = cubes(self.up(leaf), leaf)
        return x + self.down(torch.tanh(self.up(x) + gradient))


MODELS = (
    Downhill,
    lambda: Downhill(create_graph=True),
    lambda: Downhill(retain_graph=True),
    Penalty,
    lambda: Chain(*(Inside() for _ in range(4))),
)
PLANS = (
    "pp=2 microbatches=2",
    "pp=3 microbatches=2 schedule=zb-h1",
    "pp=2 microbatches=2 schedule=looped virtual_stages=2",
    "pp=2 dp=2 zero=3 microbatches=2 recompute=full",
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS, ids=["plain", "create", "retain", "penalty", "inside"])
def test_a_gradient_between_pieces_is_that_of_one_process(model: Any, plan: str) -> None:
    trains_like_one(made(model), plan, numbers(6, 5, 4))


def taken(model: Any, plan: str) -> list[str]:
    """What becomes of a rehearsal, and of a step."""
    batch, ranks = numbers(4)[0], Plan.parse(plan).mesh().size
    options = Options(example=batch)

    def rehearsed() -> None:
        rehearse(RehearsalSubject(made(model), squares, batch, options=options), plan=plan, ranks=ranks)

    def run() -> None:
        testing.run(
            ranks, lambda world: parallelize(made(model), plan, loss=squares, world=world, options=options).step(batch)
        )

    outcomes = []
    for attempt in (rehearsed, run):
        try:
            attempt()
            outcomes.append("taken")
        except PlanError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("partition", ["time", "params"])
@pytest.mark.parametrize("model", MODELS)
def test_a_rehearsal_takes_them_too_whatever_stages_are_balanced_by(model: Any, partition: str) -> None:
    assert taken(model, f"pp=2 microbatches=2 partition={partition}") == ["taken"] * 2


class Through(Chain):
    """Asks for the gradient of what a layer returns by what it is given."""

    def __init__(self, **how: bool) -> None:
        super().__init__(*linears())
        self.how = how

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            y = layer(x)
            gradient = cubes(y, x, create_graph=True, **self.how)
            x = y if gradient is None else y + gradient
        return x


class Scaled(Chain):
    """Asks for the gradient by a parameter that earlier layers depend on."""

    def __init__(self) -> None:
        super().__init__(*linears())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * self.scale
            x = x + cubes(x, self.scale, create_graph=True)
        return x


@pytest.mark.parametrize("partition", ["time", "params"])
@pytest.mark.parametrize("model", [Through, lambda: Through(allow_unused=True), Scaled])
def test_a_gradient_through_pieces_is_refused_by_both(model: Any, partition: str) -> None:
    rehearsed, ran = taken(model, f"pp=2 microbatches=2 partition={partition}")
    assert rehearsed == ran
    assert "a gradient through its pieces" in ran


def test_what_is_older_than_an_input_does_not_lead_to_it() -> None:
    class Weighed(Chain):
        def forward(self, x: Tensor) -> Any:
            first, second, last = self.layers
            weight = first(x)
            y = second(weight)
            return last(y + torch.autograd.grad((y * y * weight).sum(), y, create_graph=True)[0])

    class Other(Weighed):
        def forward(self, x: Tensor) -> Any:
            first, second, last = self.layers
            y = first(x)
            return last(y + torch.autograd.grad((y * y * second(y)).sum(), y, create_graph=True)[0])

    trains_like_one(made(lambda: Weighed(*linears(3))), "pp=3 microbatches=2", numbers(6, 5))
    with pytest.raises(CutError, match="a gradient through its pieces"):
        cut_model(made(lambda: Other(*linears(3))), stages=2, call=lambda model: model(numbers(4)[0]))
