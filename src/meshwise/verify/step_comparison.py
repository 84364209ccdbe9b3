"""Train under a plan and on one process, step by step, and compare every figure of both sides.

    one process (rank 0)      │ under the plan (every rank)     compared, by this name in the report
    ──────────────────────────┼──────────────────────────────────────────────────────────────────────
    parameters, initial       │ parameters, initial shards      the value of …, before the first step
    forward, loss             │ forward, loss                   the count, the loss
    backward                  │ backward, reduction             the gradient of …
    norm, clip                │ norm, clip                      the gradient norm
    optimizer                 │ optimizer on shards             the value of …
                              │ rank against rank               the value of … on rank r

Figures come in the order of computation, so the first figure over its bound is at the fault or just after it. Tensors
are compared one at a time: every rank except the first holds its shards and one full parameter."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import even_split
from meshwise.base.tensor_tree import row_count, take_rows
from meshwise.engine.first_rank import on_first_rank
from meshwise.engine.trainer import Trainer
from meshwise.sync.sync_scheme import mixing_weights
from meshwise.testing import ReferenceRun, largest_magnitude
from meshwise.verify.rounding_bounds import (
    BoundedDifference,
    BoundJudge,
    OutputMeanSquares,
    VerificationInputs,
    neighbours,
)
from meshwise.verify.verification_report import Divergence, ParameterFigures, StepFigures

_GRADIENT, _VALUE = "the gradient of", "the value of"
_COLLINEAR = 1e-6
"""Largest remainder, as a part of the largest element, for which a tensor counts as a multiple of another."""


class ReferenceSide:
    """One-process side of a verification: a trusted reference run, and runs of neighbours if these measure bounds."""

    def __init__(self, subject: VerificationInputs, *, judge: BoundJudge, device: torch.device) -> None:
        models = [subject.prepared()]
        if not judge.exact:
            models += neighbours(models[0], seed=subject.options.seed, precision=judge.precision)
        self.outputs = [subject.listener() for _ in models]
        self.runs: list[ReferenceRun] = []
        for model, outputs in zip(models, self.outputs, strict=True):
            self.runs.append(ReferenceRun(model, device=device, **subject.arguments(outputs)))
            outputs.listen(self.runs[-1].model)
        self._judge = judge
        self._undecided: dict[str, Tensor] = {}

    def backward(self, batch: Any) -> list[tuple[float, float]]:
        """Run forward and backward in every run; return (mean loss, count) of each. Store the undecided elements."""
        for outputs in self.outputs:
            outputs.begin()
        losses = [run.backward(batch) for run in self.runs]
        self._judge.add_undecided(self._undecided, sides=self.gradients())
        return losses

    def comparable(self, name: str, *, value: Tensor) -> Tensor:
        """Return a parameter's value, with expected elements where rounding may have decided an earlier update."""
        if name not in self._undecided:
            return value
        expected = self.runs[0].model.get_parameter(name).detach()
        return torch.where(self._undecided[name], expected, value.to(expected.device))

    def update(self) -> list[float]:
        """Update the parameters of every run, and return the gradient norm of each."""
        return [run.update() for run in self.runs]

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return the gradients of each run by name: unclipped before `update`, clipped after it."""
        return [dict(run.gradients()) for run in self.runs]

    def values(self) -> list[dict[str, Tensor]]:
        """Return the parameters and the floating-point buffers of each run, by name."""
        return [dict(run.parameters()) | dict(_floating(run.model.named_buffers())) for run in self.runs]


class StepComparison:
    """Comparison of both sides, step by step. Every rank calls its methods; only the first rank gets results.

    | steps   figures of each step
    | first   the first figure over its bound; None if there is none so far, and always on other ranks"""

    def __init__(
        self, trainer: Trainer, *, outputs: OutputMeanSquares, judge: BoundJudge, reference: ReferenceSide | None
    ) -> None:
        self._trainer = trainer
        self._outputs = outputs
        self._judge = judge
        self._reference = reference
        self._factors: dict[str, float | None] = {}
        self._gradients: dict[str, BoundedDifference] = {}
        self._values: dict[str, BoundedDifference] = {}
        self.steps: list[StepFigures] = []
        self.first: Divergence | None = None

    def start(self) -> None:
        """Compare the initial parameters and buffers of both sides."""
        values, replicas = self._compare_values(0)
        self._keep_first(itertools.chain(self._as_divergences(_VALUE, values), replicas))

    def step(self, number: int, *, batch: Any) -> None:
        """Train one step on a global batch on both sides, and compare all figures. `number` counts from 1."""
        trainer, reference = self._trainer, self._reference
        start, stop = trainer.share(row_count(batch))
        with_rows = sum(low < high for low, high in even_split(stop - start, trainer.plan.microbatches))
        self._outputs.begin(len(trainer.modules) * with_rows)  # later passes have a spare row instead of data
        result = trainer.step(batch)
        losses = on_first_rank(lambda: [] if reference is None else reference.backward(batch), world=trainer.world)
        mean_squares = self._outputs.mean_squares(trainer.world)
        gradients = self._compare(_GRADIENT, trainer.full_gradients(), number)
        norms = reference.update() if reference else []
        values, replicas = self._compare_values(number)
        if reference is None:
            return
        mean, count = losses[0]
        loss = self._number(result.loss, [loss for loss, _ in losses], number)
        norm = self._number(result.grad_norm, norms, number)
        counted = BoundedDifference(abs(result.tokens - int(count)) / count, 0.0, number)
        self.steps.append(StepFigures(mean, norms[0], loss, norm))
        _keep_worst(self._gradients, gradients)
        _keep_worst(self._values, values)
        place = {module: number for number, module in enumerate(reference.outputs[0].order)}
        backward = sorted(gradients, key=lambda name: -place.get(_owner(name), -1))  # last module of the forward first
        self._keep_first(
            itertools.chain(
                [_scalar("the count of the loss", counted, result.tokens, int(count))],
                [_scalar("the loss", loss, result.loss, mean)],
                self._as_divergences(_GRADIENT, {name: gradients[name] for name in backward}),
                [_scalar("the gradient norm", norm, result.grad_norm, norms[0])],
                self._as_divergences(_VALUE, values),
                replicas,
            ),
            forward=self._first_output(mean_squares, number),
        )

    def parameters(self) -> list[ParameterFigures]:
        """Return the largest differences of every parameter and buffer, over all steps so far."""
        return [ParameterFigures(name, self._gradients.get(name), value) for name, value in self._values.items()]

    # ---- measuring ---------------------------------------------------------------------------------------------

    def _compare_values(self, step: int) -> tuple[dict[str, BoundedDifference], list[Divergence]]:
        """Return the differences by name, and a divergence for each value that differs between two ranks."""
        trainer, digests = self._trainer, dict[str, int]()  # the sum of a tensor's bits as integers

        def values() -> Iterator[tuple[str, Tensor]]:
            for name, value in itertools.chain(trainer.full_parameters(), _floating(trainer.full_buffers())):
                bits = value.detach().contiguous().view(getattr(torch, f"int{8 * value.element_size()}"))
                digests[name] = int(bits.sum(dtype=torch.int64))
                yield name, value

        figures = self._compare(_VALUE, values(), step)
        world = trainer.world
        own = torch.tensor(list(digests.values()), dtype=torch.int64, device=world.device)
        everyone = own.new_empty(world.size, own.numel())
        world.all_gather(own, into=everyone, axes=world.mesh.names).wait()
        unequal, detail = BoundedDifference(math.inf, 0.0, step), "the ranks have different values of one parameter"
        others = [
            Divergence(f"{_VALUE} {name} on rank {rank}", step, unequal, _owner(name), detail)
            for column, name in enumerate(digests)
            for rank in (everyone[:, column] != everyone[0, column]).nonzero().flatten().tolist()
        ]
        return figures, others

    def _compare(self, kind: str, ours: Iterator[tuple[str, Tensor]], step: int) -> dict[str, BoundedDifference]:
        """Return the differences by name on the first rank. Other ranks only join in the collectives of `ours`."""
        figures: dict[str, BoundedDifference] = {}
        if self._reference is None:
            for _ in ours:
                pass
            return figures
        theirs = self._reference.gradients() if kind == _GRADIENT else self._reference.values()
        least = self._judge.floor(max((largest_magnitude(tensor) for tensor in theirs[0].values()), default=0.0))
        for name, value in ours:
            sides = [side[name] for side in theirs]
            if kind == _VALUE:
                value, *sides = (self._reference.comparable(name, value=one) for one in (value, *sides))
            spread = theirs[0].get(f"{name.removesuffix('running_mean')}running_var")  # only beside a running mean
            floor = least if spread is None else max(least, largest_magnitude(spread) ** 0.5)  # a norm divides by it
            figures[name] = self._judge.measure(value, sides=sides, least=floor, step=step)
            if figures[name].over:
                self._factors[f"{kind} {name}"] = _factor(value, sides[0])
        return figures

    def _number(self, value: float, sides: Sequence[float], step: int) -> BoundedDifference:
        ours, *theirs = (torch.tensor(one, dtype=torch.float64) for one in (value, *sides))
        return self._judge.measure(ours, sides=theirs, least=0.0, step=step)

    # ---- judging -----------------------------------------------------------------------------------------------

    def _keep_first(self, figures: Iterable[Divergence], *, forward: str | None = None) -> None:
        """Keep the first figure over its bound. `forward`: the first module whose output differs, if any."""
        over = next((found for found in figures if found.figure.over), None)
        if self.first is None and over is not None:
            self.first = over if forward is None else dataclasses.replace(over, module=forward)

    def _as_divergences(self, kind: str, figures: Mapping[str, BoundedDifference]) -> Iterator[Divergence]:
        for name, figure in figures.items():
            factor = self._factors.get(f"{kind} {name}")
            detail = "" if factor is None else f"it is {factor:.6g} times the expected value"
            yield Divergence(f"{kind} {name}", figure.step, figure, _owner(name), detail)

    def _first_output(self, ours: Mapping[str, float], step: int) -> str | None:
        """Return the first module of the forward whose output has a different mean square, or None."""
        assert self._reference is not None
        sides = [outputs.mean_squares() for outputs in self._reference.outputs]
        for name in self._reference.outputs[0].order:
            if self._number(ours.get(name, 0.0), [side[name] for side in sides], step).over:
                return name
        return None


def _keep_worst(worst: dict[str, BoundedDifference], figures: Mapping[str, BoundedDifference]) -> None:
    for name, figure in figures.items():
        worst[name] = max(worst.get(name, figure), figure, key=lambda each: each.excess)


def _scalar(what: str, figure: BoundedDifference, value: float, expected: float) -> Divergence:
    factor = f" ({value / expected:.6g} times as much)" if expected else ""
    return Divergence(what, figure.step, figure, detail=f"it is {value:.8g}, expected is {expected:.8g}{factor}")


def _factor(value: Tensor, expected: Tensor) -> float | None:
    """Return the f for which value = f · expected, if there is one."""
    ours, theirs = value.detach().double().flatten(), expected.detach().to(value.device).double().flatten()
    square = float(theirs @ theirs)
    factor = float(ours @ theirs) / square if 0 < square < math.inf else math.nan
    remainder = largest_magnitude(ours - factor * theirs)
    return factor if remainder <= _COLLINEAR * largest_magnitude(theirs) else None


def _floating(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors if tensor.is_floating_point())


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


class ReplayedSide(ReferenceSide):
    """One-process side of a verification of replicas: a reference run of each replica, and the rule of their scheme.

    It runs the published algorithm on full parameters of all replicas, without ranks, buckets and messages. Loss,
    gradients and norm are from the first replica; the parameters are the mean over the replicas."""

    def __init__(self, subject: VerificationInputs, *, judge: BoundJudge, trainer: Trainer) -> None:
        """Make the reference run of each replica. Raises ValueError unless the bound is exact."""
        if not judge.exact:
            raise ValueError(
                "replicas that agree across steps are replayed in float64 only; verify with dtype=torch.float64, and "
                "with precision=fp32 in the plan"
            )
        outputs = subject.listener()
        self.outputs = [outputs]
        arguments, replicas = {**subject.arguments(outputs), "device": trainer.world.device}, trainer.plan.dp or 1
        self.runs = [ReferenceRun(subject.prepared(), **arguments) for _ in range(replicas)]
        outputs.listen(*(run.model for run in self.runs))
        self._undecided = {}
        assert trainer.scheme is not None
        self._scheme = scheme = trainer.scheme
        units = enumerate(trainer.table.units)
        self._fragment = {row.name: number % scheme.fragments for number, unit in units for row in unit.rows}
        self._agreed = {name: value.clone() for name, value in self.runs[0].parameters()}
        self._momentum = {name: torch.zeros_like(value) for name, value in self._agreed.items()}
        self._mean: dict[str, Tensor] = {}
        self._counts = [[0.0] * replicas for _ in range(scheme.fragments)]
        self._weights: dict[int, list[float]] = {}
        self._steps = self._mixed = 0

    def backward(self, batch: Any) -> list[tuple[float, float]]:
        """Run forward and backward of each replica on its rows; return (mean loss, count) of the first."""
        self.outputs[0].begin(len(self.runs))
        shares = even_split(row_count(batch), len(self.runs))
        rows = [take_rows(batch, start=start, stop=stop) for start, stop in shares]
        losses = [run.backward(own) for run, own in zip(self.runs, rows, strict=True)]
        for counts in self._counts:
            counts[:] = [before + count for before, (_, count) in zip(counts, losses, strict=True)]
        return losses[:1]

    def update(self) -> list[float]:
        """Update every replica, let the replicas agree if it is time, and return the gradient norm of the first."""
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
        return [mean | dict(_floating(self.runs[0].model.named_buffers()))]

    def _parameters(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each parameter, and its value on each replica."""
        for named in zip(*(run.parameters() for run in self.runs), strict=True):
            yield named[0][0], [value for _, value in named]

    def _agree(self) -> None:
        scheme, step = self._scheme, self._steps
        begun, applied = scheme.fragments_to_begin(step), scheme.fragments_to_apply(step)
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
        """Take the outer step of a parameter. Set each replica's value, and its optimizer state, as the scheme says."""
        scheme, momentum = self._scheme, self._momentum[name]
        scale = self.runs[0].optimizer.param_groups[0]["lr"] if scheme.scaled_by_lr else 1.0
        change = self._mean[name] / scale
        momentum.mul_(scheme.outer_momentum).add_(change)
        change = change + scheme.outer_momentum * momentum if scheme.nesterov else momentum
        before = self._agreed[name]
        self._agreed[name] = before - scheme.outer_lr * scale * change
        for value in values:
            towards = before if scheme.elastic else self._agreed[name]
            value.copy_((1 - scheme.blend) * towards + scheme.blend * value)
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
    return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)
