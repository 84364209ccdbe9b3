"""Train a small GPT under a plan on simulated accelerators, and on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.memory.activation_offload import ActivationTransfers
from meshwise.memory.swap_file import SwapConfig
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, run

BOUND = 1e-9
NARROW_BOUND = 1e-6
"""Of figures in bf16 and fp16 on two devices that run the same operations."""


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=3, heads=2, width=8, mlp_ratio=2, tied=True)).double()


def mixture() -> nn.Module:
    return MixtureGPT(
        MixtureConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, experts=4, tied=True)
    ).double()


class DetachingGPT(GPT):
    """A GPT whose backward ends after its last block in every second forward, so that it needs no further units."""

    forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of integer tokens (B, T)."""
        self.forwards += 1
        x = self.embed(tokens)
        for block in self.blocks:
            last = block is self.blocks[-1]
            x = block(x.detach() if last and self.forwards % 2 == 0 else x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def detaching() -> nn.Module:
    return DetachingGPT(GPTConfig(vocabulary=16, context=4, layers=3, heads=2, width=8, mlp_ratio=2)).double()


def model_of(plan: Plan) -> Callable[[], nn.Module]:
    """Return the model that a plan trains: a mixture if it has `ep`."""
    return gpt if plan.ep == 1 else mixture


@functools.cache
def batches() -> Sequence[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(16, (rows, 5), generator=generator) for rows in (8, 5)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def options(plan: Plan, **more: Any) -> Options:
    saving, swap = ActivationTransfers(least=64, ahead=512, staged=4096), SwapConfig(buffer=4096)
    return Options(clip_norm=0.5, example=batches()[0] if plan.pp > 1 else None, saving=saving, swap=swap, **more)


def trained(world: World, plan: Plan) -> Any:
    trainer = parallelize(
        model_of(plan), plan, loss=next_token_loss, world=world, options=options(plan), lr=1e-2, weight_decay=0.1
    )
    steps = outcome(trainer, batches=batches())
    trainer.close()
    world.close()
    return steps


@functools.cache
def expected(model: Callable[[], nn.Module]) -> Any:
    return alone(
        model, loss=next_token_loss, batches=batches(), options=Options(clip_norm=0.5), lr=1e-2, weight_decay=0.1
    )


def losses(
    world: World, plan: Plan, model: Callable[[], nn.Module] | None = None, steps: int = 3, **more: Any
) -> list[float]:
    """Train up to three steps with no call in between, which could wait for what a step has left under way."""
    made, build = options(plan, **more), model or model_of(plan)
    trainer = parallelize(build, plan, loss=next_token_loss, world=world, options=made, lr=1e-2, weight_decay=0.1)
    found = [trainer.step(batch).loss for batch in (*batches(), batches()[0])[:steps]]
    trainer.close()
    world.close()
    return found


def parsed(text: str) -> Plan:
    plan = Plan.parse(text)
    return replace(plan, partition="params") if plan.pp > 1 else plan


def check(text: str, *, on: Any) -> None:
    """Check that two steps under a plan have the figures of one process, on every rank.

    In bf16 and fp16 a step of threads takes the place of one process, because one process has another precision."""
    plan = parsed(text)
    size = plan.mesh().size
    narrow = plan.precision != "fp32"
    like = run(size, trained, args=(plan,)) if narrow else [expected(model_of(plan))] * size
    for steps, same in zip(run(size, trained, on=on, args=(plan,)), like, strict=True):
        agree(steps, same, bound=NARROW_BOUND if narrow else BOUND)


@functools.cache
def expected_losses(model: Callable[[], nn.Module]) -> list[float]:
    three = (*batches(), batches()[0])
    clip = Options(clip_norm=0.5)
    steps = alone(model, loss=next_token_loss, batches=three, options=clip, lr=1e-2, weight_decay=0.1)
    return [step["loss"] for step in steps]


def check_losses(text: str, *, on: Any, model: Callable[[], nn.Module] | None = None, steps: int = 3) -> None:
    """Check that up to three steps under a plan have the losses of one process, on every rank."""
    plan = parsed(text)
    for found in run(plan.mesh().size, losses, on=on, args=(plan, model, steps)):
        agree(found, expected_losses(model or model_of(plan))[:steps], bound=BOUND)
