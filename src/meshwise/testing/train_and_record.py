"""Train a few steps, under a plan (`outcome`) or on one process (`alone`), and record all figures for `agree`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from meshwise.engine.trainer import Trainer
from meshwise.model.forward import Loss
from meshwise.testing.reference_run import ReferenceRun

RecordedSteps: TypeAlias = list[dict[str, Any]]
"""Figures of each step: `loss` (mean), `grad_norm` (before clipping), `tokens` (count of the loss), and `gradients` and
`parameters` (full tensors by name, copied to the CPU)."""


def outcome(trainer: Trainer, *, batches: Iterable[Any]) -> RecordedSteps:
    """Train one step on each global batch under a plan, and return the figures of every step, equal on every rank.

    Every rank calls it. The gradients of the mean loss are not clipped."""
    steps = []
    for batch in batches:
        result = trainer.step(batch)
        steps.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "gradients": _copies(trainer.full_gradients()),
                "parameters": _copies(trainer.full_parameters()),
            }
        )
    return steps


def alone(
    model: nn.Module | Callable[[], nn.Module], *, loss: Loss, batches: Iterable[Any], **training: Any
) -> RecordedSteps:
    """Train one step on each global batch with a `ReferenceRun`, and return the figures that `outcome` returns.

    `training`: the optimizer, its arguments and the options, as in `parallelize`. Gradients are unclipped."""
    single = ReferenceRun(model, loss=loss, **training)
    steps = []
    for batch in batches:
        mean, tokens = single.backward(batch)
        gradients = _copies(single.gradients())
        norm = single.update()
        parameters = _copies(single.parameters())
        steps.append(
            {"loss": mean, "grad_norm": norm, "tokens": tokens, "gradients": gradients, "parameters": parameters}
        )
    return steps


def _copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in named}
