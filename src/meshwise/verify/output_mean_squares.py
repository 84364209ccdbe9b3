"""Measure the mean square of every module's output in a step, to find the first module where two forwards differ.

Each rank and micro-batch has a part of a split model's output, so the output tensors cannot be compared. Their mean
square over all parts can be compared: it is the same for every split of the batch's rows. This is also true for an
output without a batch dim, such as a position embedding, because all parts compute the same values."""

import contextlib
import math
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwise.base.mesh import even_split
from meshwise.base.tensor_tree import row_count, tensors
from meshwise.comm.api.world import World
from meshwise.engine.trainer import Trainer
from meshwise.model.find_mixtures import find_mixtures
from meshwise.model.forward import Forward


class OutputMeanSquares:
    """Mean squares of the outputs of all modules, measured by hooks. Run the model with `forward` of this object."""

    def __init__(self, forward: Forward) -> None:
        self._inner = forward
        self._names: dict[nn.Module, str] = {}
        self._squares: dict[str, Tensor] = {}
        self._elements: dict[str, int] = {}
        self._left = 0
        self.choices = ChoiceGap()

    def listen(self, *models: nn.Module) -> None:
        """Register a hook on every module of the models, such as the stages of this rank."""
        self._names = {module: name for model in models for name, module in model.named_modules()}
        for module, name in self._names.items():
            module.register_forward_hook(partial(self._add, name))

    def begin(self, passes: int = 1) -> None:
        """Start a new step: discard all measurements, then measure the first `passes` forward passes only."""
        self._squares, self._elements, self._left = {}, {}, passes

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run one forward pass of the model, and return its output."""
        try:
            with self.choices if find_mixtures(model) else contextlib.nullcontext():
                return self._inner(model, batch)
        finally:
            self._left -= 1

    @property
    def order(self) -> list[str]:
        """Names of the modules that ran, in the order in which they first finished: inner modules before outer ones."""
        return [name for name, count in self._elements.items() if count]

    def mean_squares(self, world: World | None = None) -> dict[str, float]:
        """Return the mean square of each module by name. With `world`, over all its ranks; every rank then calls it."""
        own = {name: (float(square), self._elements[name]) for name, square in self._squares.items()}
        squares: dict[str, float] = defaultdict(float)
        elements: dict[str, int] = defaultdict(int)
        for rank in [own] if world is None else world.exchange(own):
            for name, (square, count) in rank.items():
                squares[name] += square
                elements[name] += count
        return {name: squares[name] / count for name, count in elements.items() if count}

    def _add(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002 (a forward hook)
        if self._left <= 0:
            return
        for tensor in tensors(output):
            if tensor.is_floating_point():
                if bool(tensor.isnan().any()):  # NaN marks an output that another pipeline stage computes
                    continue
                square = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square()
                self._squares[name] = self._squares.get(name, 0.0) + square
                self._elements[name] = self._elements.get(name, 0) + tensor.numel()


class ChoiceGap(TorchFunctionMode):
    """Mode that finds how near to a tie the choices of routers were.

    `smallest`: smallest gap so far between the last chosen and the first other value of a top-k. It is relative to the
    largest magnitude. None without a top-k that leaves values out."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest: float | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            scores, count, dim = args[0].detach(), result[0], (kwargs or {}).get("dim", -1)
            size = count.size(dim)
            if size < scores.size(dim):
                ordered = scores.sort(dim, descending=True).values
                gaps = ordered.select(dim, size - 1) - ordered.select(dim, size)
                found = gaps[gaps.isfinite()] / scores[scores.isfinite()].abs().max()
                self.smallest = min([*found.flatten().tolist(), math.inf if self.smallest is None else self.smallest])
        return result


def passes_with_data(trainer: Trainer, *, batch: Any) -> int:
    """Return how many of this rank's forward passes in a step have rows of the batch.

    Later passes have a spare row instead of data: they only take part in collectives."""
    start, stop = trainer.share(row_count(batch))
    return len(trainer.modules) * sum(
        first < last for first, last in even_split(stop - start, trainer.plan.microbatches)
    )
