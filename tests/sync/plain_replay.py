"""Local SGD, SlowMo, DiLoCo and gossip over replicas in one process, written plainly, to compare plans with."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def weighted_sum(terms: Iterable[tuple[float, Tensor]]) -> Tensor:
    return torch.stack([weight * value for weight, value in terms]).sum(0)


@dataclass
class Replay:
    """Replicas of a model, each with its own optimizer, that train on their rows of every batch."""

    model: nn.Module
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    optimizer: Optimizer
    size: int

    def __post_init__(self) -> None:
        self.models = [copy.deepcopy(self.model) for _ in range(self.size)]
        self.optimizers = [self.optimizer(list(model.parameters())) for model in self.models]
        self.anchor = [p.detach().clone() for p in self.model.parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.anchor]
        self.sent: dict[int, list[Tensor]] = {}
        self.counts = [0.0] * self.size
        self.steps = 0

    def local_step(self, batch: tuple[Tensor, ...]) -> None:
        """Let every replica step on its rows, which are split as evenly as possible, the first ones larger."""
        parts = zip(*(x.tensor_split(self.size) for x in batch), strict=True)
        for number, (model, optimizer, rows) in enumerate(zip(self.models, self.optimizers, parts, strict=True)):
            optimizer.zero_grad()
            total, count = self.loss(model(rows[0]), rows)
            (total / count).backward()
            optimizer.step()
            self.counts[number] += float(count)
        self.steps += 1

    def weights(self) -> list[float]:
        return [count / sum(self.counts) for count in self.counts]

    def parameters(self) -> list[list[Tensor]]:
        """Return the parameters of each replica, as tensors that may be written."""
        return [[p.detach() for p in model.parameters()] for model in self.models]

    def average(self, of: Sequence[Sequence[Tensor]], *, weights: Sequence[float]) -> list[Tensor]:
        return [weighted_sum(zip(weights, values, strict=True)) for values in zip(*of, strict=True)]

    def put(self, values: Sequence[Tensor]) -> None:
        """Give every replica these parameters."""
        for replica in self.parameters():
            for parameter, value in zip(replica, values, strict=True):
                parameter.copy_(value)

    def average_parameters(self) -> None:
        """Give every replica the mean, weighted by the counts of the round."""
        self.put(self.average(self.parameters(), weights=self.weights()))

    def average_state(self) -> None:
        """Give every optimizer the mean of their state tensors, weighted by the counts of the round."""
        weights = self.weights()
        for states in zip(*(optimizer.state.values() for optimizer in self.optimizers), strict=True):
            for key, first in states[0].items():
                if isinstance(first, Tensor) and first.dim():
                    mean = weighted_sum((w, state[key]) for w, state in zip(weights, states, strict=True))
                    for state in states:
                        state[key].copy_(mean)

    def begin_round(self) -> None:
        self.counts = [0.0] * self.size

    def outer_step(self, *, lr: float, momentum: float, nesterov: bool, unit: float = 1.0) -> None:
        """Move the agreed parameters by the mean change of the replicas, with momentum, and let all begin there."""
        mean = self.average(self.parameters(), weights=self.weights())
        for anchor, buffer, value in zip(self.anchor, self.momentum, mean, strict=True):
            change = (anchor - value) / unit
            buffer.mul_(momentum).add_(change)
            anchor.sub_(lr * unit * (change + momentum * buffer if nesterov else buffer))
        self.put(self.anchor)

    def mix(self, matrix: Sequence[Mapping[int, float]]) -> None:
        """Give each replica the weighted sum of others' parameters, by its row of a matrix."""
        old = [[x.clone() for x in replica] for replica in self.parameters()]
        for row, replica in zip(matrix, self.parameters(), strict=True):
            for number, parameter in enumerate(replica):
                parameter.copy_(weighted_sum((weight, old[other][number]) for other, weight in row.items()))

    def mean(self) -> dict[str, Tensor]:
        """Return the plain mean of the replicas' parameters, by name."""
        values = self.average(self.parameters(), weights=[1 / self.size] * self.size)
        return dict(zip([name for name, _ in self.model.named_parameters()], values, strict=True))
