"""A weight may have a leading dim of experts: (experts, out, in), with the experts split over axes of their own."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.layout.layout import Layout
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.sharded_layers import Projection
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.tp_schemes import Scheme, one_d, two_d
from meshwise.testing import run

EXPERTS, ROWS, IN, OUT = 5, 4, 6, 7
FLAT = Mesh((("ep", 2), ("tp", 2)))
GRID = Mesh((("ep", 2), ("row", 2), ("col", 2)))


def whole(*, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, IN, OUT) if transposed else (EXPERTS, OUT, IN)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    bias = torch.randn(EXPERTS, OUT, generator=generator, dtype=torch.float64)
    x = torch.randn(EXPERTS, ROWS, IN, generator=generator, dtype=torch.float64)
    return weight, bias, x


def part_of(full: Tensor, splits: Sequence[Sequence[str]], world: World) -> Tensor:
    [piece] = Layout(tuple(map(tuple, splits))).pieces(full.shape, mesh=world.mesh, rank=world.rank)
    return full[piece.slices].to(world.device, copy=True)


@pytest.mark.parametrize("transposed", [False, True], ids=["(out, in)", "(in, out)"])
@pytest.mark.parametrize(
    "mesh, scheme, role",
    [(FLAT, one_d(sequence=False), "colwise"), (FLAT, one_d(sequence=False), "rowwise"), (GRID, two_d(), "colwise")],
    ids=["1d colwise", "1d rowwise", "2d"],
)
def test_each_expert_multiplies_its_own_rows(mesh: Mesh, scheme: Scheme, role: str, transposed: bool) -> None:
    weight, bias, x = (tensor.requires_grad_() for tensor in whole(transposed=transposed))
    y = torch.baddbmm(bias[:, None], x, weight if transposed else weight.mT)
    y.square().sum().backward()
    gradients = [tensor.grad for tensor in (weight, bias, x)]  # a process gets no `grad` of a tensor

    def main(joined: World) -> None:
        world = joined.over(mesh)
        split = dataclasses.replace(scheme, experts=("ep",))
        context = SplitContext(world, split)
        projection = Projection(context, part=Part(role, transposed=transposed), shape=weight.shape)
        assert projection.layout.splits[0] == ("ep",)
        own_weight = part_of(weight.detach(), projection.layout.splits, world).requires_grad_()
        own_bias = part_of(bias.detach(), projection.bias_layout.splits, world).requires_grad_()
        x_splits = ("ep",), split.rows, projection.product.within if role == "rowwise" else split.hidden
        own_x = part_of(x.detach(), x_splits, world).requires_grad_()
        out = projection(own_x, own_weight, own_bias)
        y_splits = ("ep",), split.rows, projection.product.features
        torch.testing.assert_close(out.detach(), part_of(y.detach(), y_splits, world), rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        assert own_weight.grad is not None
        assert own_bias.grad is not None
        assert own_x.grad is not None
        if split.rows:  # other ranks have other rows of the same experts
            world.all_reduce(own_bias.grad, axes=split.rows).wait()
        for gradient, full, splits in (
            (own_weight.grad, gradients[0], projection.layout.splits),
            (own_bias.grad, gradients[1], projection.bias_layout.splits),
            (own_x.grad, gradients[2], x_splits),
        ):
            assert full is not None
            torch.testing.assert_close(gradient, part_of(full, splits, world), rtol=1e-12, atol=1e-12)

    run(mesh.size, main)
