"""Test open steps with gradients that would be left out or added up: they are refused, and the advice works."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, build_whole, run

WIDTH = 4


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def linear(world: World, plan: str) -> Trainer:
    return parallelize(lambda: net(WIDTH, 1), plan, world=world, optimizer=torch.optim.SGD, lr=0.1)


def rows_of(seed: int, columns: int = WIDTH) -> Tensor:
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the parameters after one step in plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([each.abs().sum() for each in model.parameters()]).sum()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=1", "dp=3 zero=2"])
def test_a_term_that_is_equal_on_all_ranks_goes_through_mean(plan: str) -> None:
    def main(world: World) -> dict[str, Tensor]:
        trainer = linear(world, plan)
        with trainer.open_step() as step:
            output = step.forward(step.rows(rows_of(0)))
            mean, term = step.mean(output.sum(), len(output)), penalty(trainer.model)
            if world.size > 1:
                with pytest.raises(ValueError, match=r"gradients of all ranks .*step\.mean\(term, 1\)"):
                    step.backward(mean + term)
            step.backward(mean + step.mean(term, 1))
            step.update()
        return values(trainer)

    expected = trained(
        build_whole(lambda: net(WIDTH, 1), seed=0), lambda model: model(rows_of(0)).mean() + penalty(model)
    )
    for found in run(ranks(plan), main):
        agree(found, expected, bound=1e-9)


def compared(rows: Tensor) -> Tensor:
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=3"])
def test_a_loss_of_gathered_rows_goes_through_mean(plan: str) -> None:
    """Every rank computes the same loss of all rows, as in CLIP. The gradients of the ranks must not be added up."""

    def main(world: World) -> dict[str, Tensor]:
        trainer = linear(world, plan)
        with trainer.open_step() as step:
            rows, _ = step.gather(step.forward(step.rows(rows_of(0))))
            if world.size > 1:
                with pytest.raises(ValueError, match="gradients of all ranks would be added up"):
                    step.backward(compared(rows))
            step.backward(step.mean(compared(rows), 1))
            step.update()
        return values(trainer)

    expected = trained(build_whole(lambda: net(WIDTH, 1), seed=0), lambda model: compared(model(rows_of(0))))
    for found in run(ranks(plan), main):
        agree(found, expected, bound=1e-9)


def _only_a_backward_of_the_script(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        step.mean(step.forward(step.rows(rows_of(0))).sum(), 1).backward()
        step.update()


def _a_backward_of_the_script_first(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        rows = step.rows(rows_of(0))
        step.forward(rows).sum().backward()
        step.backward(step.mean(step.forward(rows).sum(), 1))


def _a_backward_of_the_script_afterwards(trainer: Trainer) -> None:
    with trainer.open_step() as step:
        rows = step.rows(rows_of(0))
        step.backward(step.mean(step.forward(rows).sum(), 1))
        step.forward(rows).sum().backward()
        step.update()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3"])
@pytest.mark.parametrize(
    "act", [_only_a_backward_of_the_script, _a_backward_of_the_script_first, _a_backward_of_the_script_afterwards]
)
def test_a_backward_of_the_script_is_refused_and_the_next_step_works(act: Callable[[Trainer], None], plan: str) -> None:
    def main(world: World) -> dict[str, Tensor]:
        trainer = linear(world, plan)
        with pytest.raises(RuntimeError, match=r"call step\.backward\(loss\) instead of loss\.backward\(\)"):
            act(trainer)
        with trainer.open_step() as step:
            output = step.forward(step.rows(rows_of(0)))
            step.backward(step.mean(output.sum(), len(output)))
            step.update()
        return values(trainer)

    expected = trained(build_whole(lambda: net(WIDTH, 1), seed=0), lambda model: model(rows_of(0)).mean())
    for found in run(ranks(plan), main):
        agree(found, expected, bound=1e-9)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(WIDTH, 1).double()) for _ in range(2))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x @ (self.other if other else self.one)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=3"])
def test_a_critic_that_is_used_in_part_inside_of_its_own_step(plan: str) -> None:
    """The backward of the generator leaves nothing in the critic, whose step is open."""

    def main(world: World) -> float:
        generator = parallelize(lambda: net(3, WIDTH), plan, world=world, lr=0.1)
        critic = parallelize(TwoHeads, plan, world=world, lr=0.1)
        with critic.open_step() as judging:
            with generator.open_step() as step:
                score = step.through(critic, step.forward(step.rows(rows_of(1, 3))), True)
                step.backward(step.mean(score.sum(), len(score)))
                step.update()
            output = judging.forward(judging.rows(torch.ones(4, WIDTH).double()), False)
            judging.backward(judging.mean(output.sum(), len(output)))
            return judging.update().grad_norm

    for norm in run(ranks(plan), main):
        assert norm == pytest.approx(WIDTH**0.5)
