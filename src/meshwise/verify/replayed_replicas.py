"""Replay replicas that agree across steps in one process, as the reference of a verification (`ReplayedSide`).

A plan with a `sync` across steps trains otherwise than one process. Its contract is to equal the published algorithm.
This file writes the algorithm over whole parameters of replicas, without ranks, buckets and messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.base.mesh import even_split
from meshwise.sync.sync_scheme import SyncScheme, mixing_weights
from meshwise.testing.reference_run import ReferenceRun
from meshwise.verify.rounding_bounds import BoundJudge, VerificationInputs
from meshwise.verify.step_comparison import ReferenceSide


class ReplayedSide(ReferenceSide):
    """One-process side of a verification of replicas: a reference run of each replica, and the rule of their scheme.

    It returns the loss, gradients and norm of the first replica, and the mean of all replicas' parameters."""

    def __init__(
        self,
        subject: VerificationInputs,
        *,
        judge: BoundJudge,
        device: torch.device,
        scheme: SyncScheme,
        units: Mapping[str, int],
        replicas: int,
    ) -> None:
        """`units`: number of the unit of each parameter, by name. Raises ValueError unless the bound is exact."""
        if not judge.exact:
            raise ValueError(
                "replicas that agree across steps are replayed in float64 only; verify with dtype=torch.float64, and "
                "with precision=fp32 in the plan"
            )
        outputs = subject.listener()
        self.outputs = [outputs]
        arguments = subject.arguments(outputs)
        self.runs = [ReferenceRun(subject.prepared(), device=device, **arguments) for _ in range(replicas)]
        outputs.listen(*(run.model for run in self.runs))
        self._scheme = scheme
        self._fragment = {name: unit % scheme.fragments for name, unit in units.items()}
        self._agreed = {name: value.clone() for name, value in self.runs[0].parameters()}
        self._momentum = {name: torch.zeros_like(value) for name, value in self._agreed.items()}
        self._mean: dict[str, Tensor] = {}
        self._counts = [[0.0] * replicas for _ in range(scheme.fragments)]
        self._weights: dict[int, list[float]] = {}
        self._steps = self._mixed = 0

    def backward(self, batch: Any) -> list[tuple[float, float]]:
        """Run forward and backward of each replica on its rows; return (mean loss, count) of the first."""
        for outputs in self.outputs:
            outputs.begin(len(self.runs))
        shares = even_split(tree.row_count(batch), len(self.runs))
        rows = [tree.take_rows(batch, start=start, stop=stop) for start, stop in shares]
        losses = [run.backward(own) for run, own in zip(self.runs, rows, strict=True)]
        for counts in self._counts:
            counts[:] = [before + count for before, (_, count) in zip(counts, losses, strict=True)]
        return losses[:1]

    def update(self) -> list[float]:
        """Update every replica, let them agree if it is due, and return the gradient norm of the first."""
        norms = [run.update() for run in self.runs]
        self._steps += 1
        with torch.no_grad():
            self._agree()
        return norms[:1]

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return the gradients of the first replica by name."""
        return [dict(self.runs[0].gradients())]

    def values(self) -> list[dict[str, Tensor]]:
        """Return the mean of the replicas' parameters, and the buffers of the first replica, by name."""
        equal = [1 / len(self.runs)] * len(self.runs)
        mean = {name: _sum(equal, values) for name, values in self._parameters()}
        return [mean | {name: x for name, x in self.runs[0].model.named_buffers() if x.is_floating_point()}]

    def comparable(self, name: str, *, value: Tensor) -> Tensor:  # noqa: ARG002 - rounding decides no float64 update
        """Return the value itself."""
        return value

    def _parameters(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each parameter, and its value on each replica."""
        for named in zip(*(run.parameters() for run in self.runs), strict=True):
            yield named[0][0], [value for _, value in named]

    def _agree(self) -> None:
        scheme, step = self._scheme, self._steps
        begun, applied = scheme.begun(step), scheme.applied(step)
        if scheme.in_groups(step):
            self._mix(f"groups:{scheme.group}")
        if scheme.graph != "all":
            if begun:
                self._mix(scheme.graph)
                self._mixed += 1
            return
        for fragment in begun:
            counts, self._counts[fragment] = self._counts[fragment], [0.0] * len(self.runs)
            self._weights[fragment] = [count / sum(counts) for count in counts]
        for name, values in self._parameters():
            fragment = self._fragment[name]
            if fragment in begun:
                self._mean[name] = self._agreed[name] - _sum(self._weights[fragment], values)
            if fragment in applied and name in self.runs[0].masters:
                self._apply(name, values)

    def _apply(self, name: str, values: Sequence[Tensor]) -> None:
        """Take the outer step of a parameter, and let each replica begin there, with its state as the scheme says."""
        scheme, momentum = self._scheme, self._momentum[name]
        unit = self.runs[0].optimizer.param_groups[0]["lr"] if scheme.scaled_by_lr else 1.0
        change = self._mean[name] / unit
        momentum.mul_(scheme.outer_momentum).add_(change)
        change = change + scheme.outer_momentum * momentum if scheme.nesterov else momentum
        self._agreed[name] -= scheme.outer_lr * unit * change
        for value in values:
            value.copy_((1 - scheme.blend) * self._agreed[name] + scheme.blend * value)
        states = [run.optimizer.state.get(run.masters[name], {}) for run in self.runs]
        for key, first in list(states[0].items()):
            if scheme.state == "mean" and isinstance(first, Tensor) and first.shape == values[0].shape:
                mean = _sum(self._weights[self._fragment[name]], [state[key] for state in states])
                for state in states:
                    state[key].copy_(mean)
        if scheme.state == "reset":
            for state in states:
                state.clear()

    def _mix(self, graph: str) -> None:
        rows = mixing_weights(graph, size=len(self.runs), round_number=self._mixed)
        for _, values in self._parameters():
            mixed = [_sum(list(row.values()), [values[other] for other in row]) for row in rows]
            for value, new in zip(values, mixed, strict=True):
                value.copy_(new)


def _sum(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of the tensors."""
    return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)
