"""A plain module beside the same module split over ranks, without an engine: outputs, losses and every gradient."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.base.mesh import even_split
from meshwise.comm.api.world import World
from meshwise.model.parameter_table import Placement
from meshwise.plan import Plan
from meshwise.reference import GPTConfig
from meshwise.tensor.core.module_role import Norm, Part
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.tensor_parallel import tensor_parallel
from meshwise.tensor.tp_schemes import mesh_with_kv_replicas, scheme_on
from meshwise.testing import run

Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]

SCHEMES = {
    "1d, 2 ranks": "tp=2",
    "1d, 3 ranks": "tp=3",
    "1d with sequence parallel, 2 ranks": "tp=2 sequence_parallel=1",
    "1d with sequence parallel, 3 ranks": "tp=3 sequence_parallel=1",
    "2d, 4 ranks": "tp=4 tp_mode=2d",
    "2.5d, 8 ranks": "tp=8 tp_mode=2.5d tp_depth=2",
    "3d, 8 ranks": "tp=8 tp_mode=3d",
}


@dataclass(frozen=True)
class Outcome:
    """The loss of a model, and the gradients of its parameters."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


def alone(model: nn.Module, *, inputs: Sequence[Tensor], loss: Loss) -> Outcome:
    """On one process."""
    module = copy.deepcopy(model)
    total = loss(module, inputs)
    total.backward()
    return Outcome(total.detach(), {name: _gradient(parameter) for name, parameter in module.named_parameters()})


def install(
    module: nn.Module, *, plan: str, world: World, parts: Mapping[str, Part], keeps: bool = False
) -> Mapping[str, Placement]:
    """Split a module and put this rank's part of every parameter into it."""
    chosen = Plan.parse(plan)
    scheme = scheme_on(world.mesh, plan=chosen, blocks=False)
    outside = SplitContext(world, scheme, keeps=keeps)
    placements = tensor_parallel(module, plan=chosen, parts=parts, outside=outside)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        part = part_of(parameter.detach(), placements[name], world=world)
        made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for owner in module.modules():
        for key, value in list(owner._parameters.items()):
            if value is not None:
                setattr(owner, key, made[value])
    return placements


def part_of(full: Tensor, placement: Placement, *, world: World) -> Tensor:
    """What this rank stores of a full tensor."""
    pieces = placement.layout.pieces(full.shape, mesh=world.mesh, rank=world.rank)
    return torch.cat([full[piece.slices] for piece in pieces], dim=placement.layout.section_dim).clone()


def own_rows(inputs: Sequence[Tensor], *, plan: str, world: World) -> list[Tensor]:
    """The rows of the batch that are this rank's."""
    group = world.group(Plan.parse(plan).row_axes)
    return [x[slice(*even_split(x.size(0), group.size)[group.index])] for x in inputs]


def split_agrees(
    model: nn.Module,
    *,
    plan: str,
    parts: Mapping[str, Part],
    batch: tuple[Sequence[Tensor], Loss],
    keeps: bool = False,
    bound: float = 1e-11,
) -> None:
    """Assert that loss and gradients, summed over the ranks that hold other rows, are those of one process.

    `batch`: the inputs, rows in dim 0, and a loss that is a sum over rows."""
    inputs, loss = batch
    expected = alone(model, inputs=inputs, loss=loss)
    mesh = mesh_with_kv_replicas(Plan.parse(plan), parts=parts.values())

    def main(world: World) -> None:
        world = world.over(mesh)
        module = copy.deepcopy(model).to(world.device)
        placements = install(module, plan=plan, world=world, parts=parts, keeps=keeps)
        total = loss(module, [x.to(world.device) for x in own_rows(inputs, plan=plan, world=world)])
        total.backward()
        found = total.detach().clone()
        world.all_reduce(found, axes=Plan.parse(plan).row_axes).wait()
        torch.testing.assert_close(found.cpu(), expected.loss, rtol=bound, atol=0)
        for name, parameter in module.named_parameters():
            gradient = _gradient(parameter).clone()
            world.all_reduce(gradient, axes=placements[name].summed).wait()
            wanted = part_of(expected.gradients[name], placements[name], world=world)
            scale = float(expected.gradients[name].abs().max())
            apart = float((gradient.cpu() - wanted).abs().max()) if wanted.numel() else 0.0
            assert apart <= bound * scale, f"{name}: {apart:.3g} apart, beside a gradient of {scale:.3g}"

    run(mesh.size, main)


def gpt_parts(config: GPTConfig) -> dict[str, Part]:
    """The parts of the reference GPT."""
    norm = Part("norm", norm=Norm(centred=True, epsilon=1e-5))
    width, keys = config.width, (config.kv_heads or config.heads) * config.head_width
    group = config.heads // (config.kv_heads or config.heads)
    parts = {"embedding": Part("embedding"), "positions": Part("positions"), "norm": norm, "head": Part("head")}
    for number in range(config.layers):
        block = f"blocks.{number}"
        parts |= {
            block: Part("block"),
            f"{block}.attention_norm": norm,
            f"{block}.attention": Part("attention", counts=(("heads", 1),)),
            f"{block}.attention.qkv": Part("colwise", sections=(width, keys, keys), grain=config.head_width),
            f"{block}.attention.projection": Part("rowwise", grain=config.head_width * group),
            f"{block}.mlp_norm": norm,
            f"{block}.mlp.expansion": Part("colwise"),
            f"{block}.mlp.projection": Part("rowwise"),
        }
    return parts


def _gradient(parameter: Any) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
