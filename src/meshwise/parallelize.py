"""The one place where the parts meet, in one fixed order.

plan -> world over the plan's mesh -> model (born or as it is) -> parameter table -> parts that tensor parallelism
splits, and where that stores the rows -> units and their buckets -> buffers -> optimizer over the owned slices
-> trainer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.comm.launch import connect
from meshwise.comm.thread_world import ThreadWorld
from meshwise.comm.world import World
from meshwise.data_parallel.engine import DataParallel
from meshwise.model.birth import Source, born
from meshwise.model.draws import Draws
from meshwise.model.forward import Forward, Loss, default_forward
from meshwise.model.table import ParameterOptions, parameter_table
from meshwise.nonfinite import SkipPolicy
from meshwise.optim.flat import OptimizerClass, flat_optimizer
from meshwise.plan import Plan
from meshwise.tensor.matmul import Streaming
from meshwise.tensor.parallelism import tensor_parallel
from meshwise.tensor.rules import Rules, find_parts
from meshwise.tensor.slices import slices
from meshwise.tensor.twins import mesh_with_twins
from meshwise.trainer import Recipe, Trainer


@dataclass(frozen=True)
class Options:
    """What a run may choose besides its plan. None of it depends on the number of ranks."""

    clip_norm: float | None = None
    """Scale the gradient down to this 2-norm when it is larger. None: never."""

    seed: int = 0
    """Seed of a model that is born here (one given as a function), and of what a model draws as it trains: dropout."""

    nonfinite: str = "raise"
    """When the loss or the gradient is not finite: `raise`, or `skip:n` to skip at most n such steps in a row."""

    forward: Forward | None = None
    """`forward(model, batch) -> output`; by default `meshwise.model.forward.default_forward`."""

    parameter_options: ParameterOptions | None = None
    """`(name, parameter) -> optimizer options`; by default vectors (biases, norms) have no weight decay."""

    tensor_rules: Rules | None = None
    """With tp, the parts of modules whose names match a pattern: `{"blocks.*.up": "first"}`; see
    `meshwise.tensor.rules.Rules`. None: what the model declares and its structure says."""

    streaming: Streaming = dataclasses.field(default_factory=Streaming)
    """With tp, how operands that are gathered come together: `Streaming(keep=True)` keeps them for the backward,
    `Streaming(panels=4)` never holds a whole one."""


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: OptimizerClass = torch.optim.AdamW,
    world: World | None = None,
    options: Options | None = None,
    **optimizer_arguments: Any,
) -> Trainer:
    """Put a plain model under a plan, on the ranks of `world` (by default the ones that torchrun started, or one).

    `model` is a module, taken as it is (the first rank's values count), or a function that builds one: then no rank
    holds more of the model than its plan says, and the same seed is the same model under every plan.
    `loss(output, batch)` returns (sum, count). The optimizer's own arguments follow by keyword: `lr=3e-4`.

    Raises PlanError when the plan does not fit the world, ValueError for a model, optimizer or option that cannot work.
    """
    options = options or Options()
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    world = world or connect()
    plan = plan.resolve(world.size)
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise ValueError(f"clip_norm={options.clip_norm}; give a norm above 0, or None to leave gradients as they are")
    skip = SkipPolicy.parse(options.nonfinite)

    source = born(model, seed=options.seed)
    table = parameter_table(source.module, options=options.parameter_options)
    parts = find_parts(source.module, plan=plan, rules=options.tensor_rules) if plan.tp > 1 else {}
    world = world.over(mesh_with_twins(plan, parts=parts.values()))
    if parts:
        table = table.placed(
            tensor_parallel(source.module, plan=plan, world=world, parts=parts, streaming=options.streaming)
        )
    _refuse_batch_norm(source.module, parts=world.group(plan.data_axes).size * plan.microbatches)
    engine = DataParallel(source, table=table, world=world, zero=plan.zero)
    _place_buffers(source, world)
    if not engine.buckets:
        raise ValueError("every parameter is frozen; set requires_grad=True on those that should train")
    local = plan.random == "local"
    if local and parts and isinstance(world, ThreadWorld):
        raise ValueError("random=local draws from torch's own generator, which threads share; give random=global")
    before, after = slices(source.module, plan=plan, parts=parts)
    draws = Draws(source.module, seed=options.seed, before=before, after=after, local=local)
    recipe = Recipe(options.forward or default_forward, loss, options.clip_norm, skip, draws)
    update = flat_optimizer(optimizer, groups=engine.slices(), **optimizer_arguments)
    return Trainer(engine, plan=plan, recipe=recipe, optimizer=update)


def _place_buffers(source: Source, world: World) -> None:
    """Buffers are whole everywhere, on the device, and the first rank's values count for a model taken as it is."""
    source.buffers()
    for module in source.module.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            placed = buffer.to(world.device).contiguous()
            if not source.deferred:
                world.broadcast(placed, axes=world.mesh.names).wait()
            setattr(module, name, placed)


def _refuse_batch_norm(module: nn.Module, *, parts: int) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for name, part in module.named_modules():
        if parts > 1 and isinstance(part, kinds) and part.training:
            raise ValueError(
                f"{name or type(part).__name__} ({type(part).__name__}) would take its statistics over 1/{parts} of "
                "each batch, so the split model would not be the same model; use GroupNorm or LayerNorm, put it into "
                "eval mode, or train with dp=1 microbatches=1"
            )
