"""Train and collect the results step by step: by a trainer under a plan, and by one process. For `agree`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from meshwise.engine.trainer import Trainer
from meshwise.model.forward import Loss
from meshwise.testing.reference_run import ReferenceRun

Steps: TypeAlias = list[dict[str, Any]]


def outcome(trainer: Trainer, *, batches: Iterable[Any]) -> Steps:
    """Train on the global batches: of each step the loss, the norm, the tokens, every gradient and parameter.

    Every rank calls it and gets all of it. The gradients are the averaged ones, before clipping.
    """
    steps = []
    for batch in batches:
        result = trainer.step(batch)
        steps.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "gradients": _kept(trainer.full_gradients()),
                "parameters": _kept(trainer.full_parameters()),
            }
        )
    return steps


def alone(model: nn.Module | Callable[[], nn.Module], *, loss: Loss, batches: Iterable[Any], **training: Any) -> Steps:
    """Return the same of one process, which is `ReferenceRun`. `training`: the optimizer, its arguments and the
    options, as `parallelize` takes them.
    """
    single = ReferenceRun(model, loss=loss, **training)
    steps = []
    for batch in batches:
        mean, tokens = single.backward(batch)
        gradients = _kept(single.gradients())
        norm = single.update()
        parameters = _kept(single.parameters())
        steps.append(
            {"loss": mean, "grad_norm": norm, "tokens": tokens, "gradients": gradients, "parameters": parameters}
        )
    return steps


def _kept(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in named}
