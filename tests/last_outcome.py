"""Outcomes of trainings with the gradients and parameters of the last step alone, which are compared in less time.

A wrong gradient or parameter of an earlier step shows in the loss and the norm of the next one, and in the last values.
To gather all of them on every rank takes about as long as a step."""

from collections.abc import Sequence
from typing import Any

from meshwise import testing
from meshwise.engine.trainer import Trainer
from meshwise.testing import RecordedSteps


def outcome(trainer: Trainer, *, batches: Sequence[Any]) -> RecordedSteps:
    """Train one step on each batch, as `meshwise.testing.outcome`."""
    *earlier, last = batches
    figures = [(result.loss, result.grad_norm, result.tokens) for result in map(trainer.step, earlier)]
    steps = [{"loss": loss, "grad_norm": norm, "tokens": tokens} for loss, norm, tokens in figures]
    return [*steps, *testing.outcome(trainer, batches=[last])]


def alone(*model: Any, **training: Any) -> RecordedSteps:
    """Train on one process, as `meshwise.testing.alone`."""
    *earlier, last = testing.alone(*model, **training)
    return [*({key: step[key] for key in ("loss", "grad_norm", "tokens")} for step in earlier), last]
