"""The gradient noise scale: a known answer, and the same number under every plan with the same micro-batches."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise import Options, Plan, PlanError, parallelize
from meshwise.comm.api.world import World
from meshwise.engine.noise_scale import NoiseScale, layer_of
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.squeeze(self.linear(x), 1)


def half_square(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum() / 2, output.numel()


def test_a_linear_regression_has_the_scale_of_its_formula() -> None:
    """For y = e with x ~ N(0, 1) and e ~ N(0, s²), |G|² = |w|² and tr(Σ) = (n + 1) |w|² + n s²."""
    size, spread = 8, 2.0
    generator = torch.Generator().manual_seed(0)

    trainer = parallelize(
        Linear, "dp=1 microbatches=4", loss=half_square, options=Options(noise=True), lr=0.0, weight_decay=0.0
    )
    found = []
    for _ in range(100):
        x = torch.randn(4096, size, dtype=torch.float64, generator=generator)
        y = spread * torch.randn(4096, dtype=torch.float64, generator=generator)
        noise = trainer.step((x, y)).noise
        assert noise is not None
        found.append((noise.trace, noise.square))
    trace, square = torch.tensor(found).mean(dim=0).tolist()
    truth = size * 0.25
    assert square == pytest.approx(truth, rel=0.05)
    assert trace == pytest.approx((size + 1) * truth + size * spread**2, rel=0.05)
    assert trace / square == pytest.approx((size + 1) + spread**2 / 0.25, rel=0.05)


def build() -> GPT:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2, bias=True)).double()


@functools.cache
def measured(plan: str) -> list[NoiseScale]:
    tokens = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(3))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def main(world: World) -> Any:
        options = Options(noise=True, example=batch)
        trainer = parallelize(build, plan, loss=next_token_loss, world=world, options=options, lr=0.01)
        return [trainer.step(batch).noise for _ in range(2)]

    ranks: list[list[NoiseScale]] = run(Plan.of(plan).mesh().size, main)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


PLANS = (
    "dp=2 microbatches=2",
    "dp=4 zero=1",
    "dp=4 zero=3",
    "dp=2 zero=2 microbatches=2",
    "tp=2 microbatches=4",
    "tp=2 dp=4 zero=1",
    "pp=2 microbatches=4",
    "pp=2 dp=2 zero=1 microbatches=2",
    "dp=2 microbatches=2 recompute=full",
)


@pytest.mark.grid(Grid({"plan": PLANS}, heavy=lambda cell: cell["plan"] in ("tp=2 dp=4 zero=1", "pp=2 microbatches=4")))
def test_every_plan_with_four_micro_batches_measures_the_same(plan: str) -> None:
    for ours, single in zip(measured(plan), measured("dp=1 microbatches=4"), strict=True):
        assert ours.trace == pytest.approx(single.trace, rel=1e-9)
        assert ours.square == pytest.approx(single.square, rel=1e-9)
        assert ours.layers.keys() == single.layers.keys()
        for name, values in single.layers.items():
            assert ours.layers[name] == pytest.approx(values, rel=1e-9)


def test_the_micro_batches_give_the_definition() -> None:
    tokens = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(3))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    trainer = parallelize(build, "dp=1 microbatches=4", loss=next_token_loss, options=Options(noise=True), lr=0.0)
    noise = trainer.step(batch).noise
    assert noise is not None

    def squared_norm(rows: slice) -> float:
        model = trainer.model
        total, count = next_token_loss(model(batch[0][rows]), (batch[0][rows], batch[1][rows]))
        gradients = torch.autograd.grad(total / count, list(model.parameters()))
        return float(sum(gradient.square().sum() for gradient in gradients))

    small = sum(squared_norm(slice(2 * part, 2 * part + 2)) for part in range(4)) / 4
    whole = squared_norm(slice(None))
    assert noise.square == pytest.approx((8 * whole - 2 * small) / 6, rel=1e-9)
    assert noise.trace == pytest.approx((small - whole) / (1 / 2 - 1 / 8), rel=1e-9)
    assert noise.scale == noise.trace / noise.square


def test_one_all_reduce_carries_it() -> None:
    tokens = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(3))

    def main(world: World, noise: bool) -> list[str]:
        trainer = parallelize(build, "dp=2", loss=next_token_loss, world=world, options=Options(noise=noise), lr=0.01)
        with world.record() as records:
            trainer.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return [record.kind for record in records]

    assert run(2, functools.partial(main, noise=True)) == run(2, functools.partial(main, noise=False))


@pytest.mark.parametrize("rows, plan", [(8, "dp=1"), (7, "dp=1 microbatches=2")])
def test_a_step_without_equal_micro_batches_has_no_noise(rows: int, plan: str) -> None:
    tokens = torch.randint(16, (rows, 5), generator=torch.Generator().manual_seed(3))
    trainer = parallelize(build, plan, loss=next_token_loss, options=Options(noise=True), lr=0.01)
    assert trainer.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())).noise is None


def test_offloaded_state_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"the noise scale needs .* 'offload=optimizer:cpu' moves or splits it; use off"
    ):
        parallelize(build, "offload=optimizer:cpu", loss=next_token_loss, options=Options(noise=True), lr=0.01)


@pytest.mark.parametrize(
    "name, layer", [("blocks.3.mlp.weight", "blocks.3"), ("embedding.weight", "embedding"), ("weight", "weight")]
)
def test_a_layer_is_a_block_or_a_module(name: str, layer: str) -> None:
    assert layer_of(name) == layer
