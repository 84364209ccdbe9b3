"""Test rows of the parameter table that only the ranks at some mesh coordinates hold."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data_parallel.hand_made_engine import HandMade
from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.data_parallel.gradient_reduction import ZERO
from meshwise.model.parameter_table import ParameterTable, parameter_table
from meshwise.testing import run

MESH = Mesh((("pp", 1), ("dp", 2), ("ep", 2)))


class Mixture(nn.Module):
    """A layer that all rows pass, and experts of which a row passes one. Some of the experts may be elsewhere."""

    def __init__(self, *, experts: tuple[int, ...]) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 5, dtype=torch.float64)
        made = [nn.Linear(5, 2, dtype=torch.float64) for _ in range(2)]
        self.experts = nn.ModuleDict({str(index): made[index] for index in experts})
        generator = torch.Generator().manual_seed(5)
        for layer in (self.shared, *made):
            for parameter in layer.parameters():
                parameter.data.normal_(generator=generator)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        output: Tensor = self.experts[str(expert)](torch.tanh(self.shared(x)))
        return output


def loss_of(model: nn.Module, *, dp: int, ep: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + 2 * dp + ep)
    x = torch.randn(3 + dp, 3, generator=generator, dtype=torch.float64)
    output: Tensor = model(x.to(next(model.parameters()).device), ep)
    return output.square().sum()


def table() -> ParameterTable:
    whole = parameter_table(Mixture(experts=(0, 1)), replicas=("dp", "ep"))
    units = []
    for unit in whole.units:
        rows = []
        for row in unit.rows:
            if row.name.startswith("experts"):
                expert = int(row.name.split(".")[1])
                row = dataclasses.replace(row, held_at=(("ep", expert),), summed=("dp",))
            rows.append(row)
        units.append(dataclasses.replace(unit, rows=tuple(rows)))
    return ParameterTable(tuple(units))


def reference(*, steps: int) -> tuple[nn.Module, float]:
    model = Mixture(experts=(0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    squared = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        for dp in range(2):
            for ep in range(2):
                loss_of(model, dp=dp, ep=ep, step=step).backward()
        squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        optimizer.step()
    return model, squared


def hand_made(joined: World, *, zero: int) -> tuple[HandMade, dict[str, int]]:
    world = joined.over(MESH)
    place = {axis: index for axis, index in MESH.coordinate(world.rank).items() if axis != "pp"}
    return HandMade(Mixture(experts=(place["ep"],)), table(), world, ZERO[zero]), place


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_it_is_summed_counted_and_shown_like_any_other(zero: int) -> None:
    expected, squared = reference(steps=2)
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}  # no process gets a `grad`

    def main(joined: World) -> None:
        training, place = hand_made(joined, zero=zero)
        for step in range(2):
            found = training.step(loss_of(training.module, **place, step=step))
        assert found == pytest.approx(squared, rel=1e-12)
        gradients = {name: value.clone() for name, value in training.engine.full_gradients()}
        parameters = {name: value.clone() for name, value in training.engine.full_parameters()}
        assert gradients.keys() == parameters.keys() == wanted.keys()
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(parameters[name].cpu(), parameter.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradients[name].cpu(), wanted[name], rtol=1e-12, atol=1e-12)

    run(MESH.size, main)


def test_each_rank_stores_its_own_expert_alone() -> None:
    def main(joined: World) -> dict[str, int]:
        return hand_made(joined, zero=3)[0].engine.memory()

    held = run(MESH.size, main)
    # shared: 20 elements over four ranks, an expert: 12 over two; shards are padded to 16 elements each
    assert {each["parameters"] for each in held} == {(16 + 16) * 8}


@pytest.mark.parametrize("before, after", [(0, 3), (3, 1)])
def test_it_is_saved_once_and_loaded_where_it_lives(before: int, after: int, tmp_path: Path) -> None:
    expected, _ = reference(steps=2)

    def first(joined: World) -> None:
        training, place = hand_made(joined, zero=before)
        training.step(loss_of(training.module, **place, step=0))
        training.save(tmp_path / "saved")

    def second(joined: World) -> None:
        training, place = hand_made(joined, zero=after)
        training.state.load(tmp_path / "saved")
        training.step(loss_of(training.module, **place, step=1))
        for name, value in training.engine.full_parameters():
            torch.testing.assert_close(value.cpu(), expected.get_parameter(name).detach(), rtol=1e-12, atol=1e-12)

    run(MESH.size, first)
    run(MESH.size, second)
