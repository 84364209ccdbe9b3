"""Train a few steps, under a plan (`outcome`) or on one process (`alone`), and return all figures, for `agree`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from meshwise.engine.trainer import Trainer
from meshwise.model.forward import Loss
from meshwise.testing.reference_run import ReferenceRun

RecordedSteps: TypeAlias = list[dict[str, Any]]


def outcome(trainer: Trainer, *, batches: Iterable[Any]) -> RecordedSteps:
    """Train on global batches, and return per step the loss, the norm, the tokens, and every gradient and parameter.

    Every rank calls it and gets all figures. Gradients are the averaged ones, before clipping.
    """
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
    """Train on one process with a `ReferenceRun`, and return the same figures as `outcome`.

    `training`: the optimizer, its arguments and the options, as `parallelize` takes them.
    """
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
