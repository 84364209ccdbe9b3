"""Test split models: run ranks, train under a plan and on one process, compare the figures, count the collectives.

docs/testing.md has a whole test, the functions, the rules of the reference, and the formula by which two outcomes
agree. An outcome holds the figures to compare, by name: tensors and numbers in nested mappings and sequences."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.attention.context_parallel import ContextParallel, token_rules, use_attend
from meshwise.base.tensor_tree import map_tensors, row_count
from meshwise.base.text_format import align_columns
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld, run_threads
from meshwise.comm.launch.launch import run as run_processes
from meshwise.engine.parallelize import Options
from meshwise.engine.trainer import Trainer
from meshwise.expert.expert_capacity import limit_experts
from meshwise.expert.router_losses import RouterLosses
from meshwise.expert.router_updates import RouterUpdates
from meshwise.memory.recompute_costs import saved_bytes_hook
from meshwise.model.deferred_init import build_with_values, install
from meshwise.model.forward import Loss, call_loss, default_forward
from meshwise.model.module_copy import copy_with_hooks
from meshwise.model.parameter_table import matrices_decay, parameter_table
from meshwise.model.random_draws import RandomDraws, SampleRows
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim.build_optimizer import default_options, needs_of
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import ModelCasts, Precision, convert, widen_for_loss

_ROUNDINGS = 128


@dataclass(frozen=True)
class Difference:
    """Largest difference of two tensors (relative, see the module's docstring), its index, and both values there."""

    relative: float = 0.0
    index: tuple[int, ...] = ()
    value: float = 0.0
    expected: float = 0.0


def difference(value: Tensor, expected: Tensor, *, floor: float = 0.0) -> Difference:
    """Return the relative difference of two tensors of the same shape, computed in float64.

    The difference is infinite for a NaN on either side, and for an infinity on one side only. If `expected` and `floor`
    are zero, it is infinite for a value other than zero. Raises ValueError when the shapes differ."""
    if value.shape != expected.shape:
        raise ValueError(f"shape {tuple(value.shape)} cannot be compared with {tuple(expected.shape)}")
    if not expected.numel():
        return Difference()
    theirs = expected.detach().double().reshape(-1)
    ours = value.detach().to(theirs.device).double().reshape(-1)
    furthest, at = (ours - theirs).abs_().max(dim=0)
    if not furthest.isfinite():
        apart = torch.where(ours == theirs, torch.zeros_like(theirs), (ours - theirs).abs())
        furthest, at = apart.nan_to_num_(nan=math.inf, posinf=math.inf).max(dim=0)
    largest, scale = float(furthest), max(largest_magnitude(theirs), floor)
    relative = 0.0 if largest == 0 else largest / scale if 0 < scale < math.inf else math.inf
    index = tuple(map(int, np.unravel_index(int(at), tuple(expected.shape))))
    return Difference(relative, index, float(ours[at]), float(theirs[at]))


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor: 0 when it is empty, infinity when it holds a NaN."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().max())
    return math.inf if math.isnan(largest) else largest


def rounding_floor(largest: float, *, bound: float, dtype: torch.dtype) -> float:
    """Return the scale below which a tensor is only rounding, in a family whose largest absolute value is `largest`."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return largest * min(1.0, _ROUNDINGS * eps / bound) if bound > 0 and largest < math.inf else 0.0


class ReferenceRun:
    """Training of an unsplit model on one process, on the CPU or on `device`. Other arguments are as in `parallelize`.

    A function as `model` gives the same initial parameters as under every plan with the same seed. A module is copied.
    `masters`: the values that `optimizer` updates, by name: the trained parameters, or wider copies."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        options: Options | None = None,
        device: torch.device | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        self._options = options or Options()
        self._loss = loss
        self._device = torch.device("cpu") if device is None else device
        self.model = build_whole(model, seed=self._options.seed).to(self._device)
        losses = RouterLosses.of(self._options.router_losses)
        self._routers = RouterUpdates(rate=self._options.expert_bias_rate, device=self._device, losses=losses)
        self._routers.prepare(self.model)
        rule = self._options.parameter_options or default_options(optimizer, module=self.model) or matrices_decay
        self._precision = self._options.precision or Precision()
        unrounded = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        convert(self.model, precision=self._precision)
        self._casts = ModelCasts(self._precision, device=self._device)
        self._casts.hook(self.model)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        for name, p in self._trained.items():
            dtype = self._precision.master_of(p.dtype)
            self.masters[name] = p if p.dtype == dtype else nn.Parameter(unrounded[name].to(dtype))
        groups = [{"params": [p], **rule(name, self._trained[name])} for name, p in self.masters.items()]
        if needs_of(optimizer):
            optimizer_arguments["logical"] = LogicalTensors(self.masters)
        self.optimizer = optimizer(groups, **optimizer_arguments)
        tokens = None
        if rules := token_rules(self._options.tensor_rules):
            one_rank = TraceWorld(rank=0, mesh=Plan().mesh(), device=self._device)
            tokens = ContextParallel(Plan(), world=one_rank, rules=rules, dense=True)
        self.draws = RandomDraws(self.model, seed=self._options.seed, tokens=None if tokens is None else tokens.mode)
        if tokens is not None:
            tokens.attention.draws = self.draws
            tokens.install(self.model)
        else:  # torch's FlexAttention has no backward on CPUs, and fails under modes that see each operation
            use_attend(self.model, flex_only=True)
        self._routers.follow(self.model)
        limit_experts(self.model, capacity=self._options.expert_capacity, routers=self._routers)
        self._steps = 0

    def backward(self, batch: Any) -> tuple[float, float]:
        """Run forward and backward of a global batch, and return the mean loss and its count. Replaces old gradients.

        Raises ValueError when `loss` does not return (sum, count), or counts nothing."""
        self.model.zero_grad()
        self._routers.begin()
        total, counted = self._run(batch)
        total, self._routers.scale = total + self._routers.loss, 1 / counted
        with self.draws.running(SampleRows(0, row_count(batch)), again=True):
            (total / counted).backward()
        self._routers.active = False
        self._steps += 1
        for name, parameter in self._trained.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.masters[name].grad = gradient.to(self.masters[name].dtype)
        return float(total.detach()) / counted, counted

    def evaluate(self, batch: Any) -> float:
        """Return the mean loss of a global batch, without gradients. Raises the errors of `backward`."""
        with torch.no_grad():
            total, counted = self._run(batch)
        return float(total) / counted

    def _run(self, batch: Any) -> tuple[Tensor, float]:
        batch = map_tensors(lambda tensor: tensor.to(self._device), batch)
        forward = self._options.forward or default_forward
        self.draws.begin(self._steps)
        with self.draws.running(SampleRows(0, row_count(batch))):
            with self._casts.forward(self.model, batch=batch):
                output = forward(self.model, batch)
            output = output if self._precision.compute_dtype is None else widen_for_loss(output)
            total, count = call_loss(self.model, batch, forward=lambda _model, _batch: output, loss=self._loss)
        if not float(count):
            raise ValueError("the loss counted nothing in this batch: it returned a count of 0")
        return total, float(count)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of the trained parameters: unclipped before `update`, clipped after it."""
        for name, parameter in self.masters.items():
            assert parameter.grad is not None
            yield name, parameter.grad

    def update(self) -> float:
        """Clip the gradients, update the parameters, and return the gradient norm before clipping."""
        clip = self._options.clip_norm
        norm = nn.utils.clip_grad_norm_(self.masters.values(), float("inf") if clip is None else clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(self.masters[name])
        self._routers.update()
        return float(norm)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return (name, value) of every parameter, frozen or not; a tied parameter once, under its first name."""
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


def build_whole(model: nn.Module | Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Return the model with all its values on the CPU, initialized as under every plan; a module is copied."""
    source = build_with_values(copy_with_hooks(model) if isinstance(model, nn.Module) else model, seed=seed)
    source.fill_buffers()
    for row in parameter_table(source.module).rows:
        install(source.module, row=row, tensor=source.full(row.name).detach().clone())
    return source.module


def run(size: int, main: Callable[..., Any], *, on: Any = "threads", args: tuple[Any, ...] = ()) -> list[Any]:
    """Call `main(world, *args)` on `size` ranks, and return the results by rank.

    | on   "threads" start in milliseconds and take any callable; "processes" start in seconds, and `main` must be at
    |      the top level of a module, see `meshwise.run`. Also an object with a method `run(size, main, args=…)`

    Raises the error of the first rank that failed, with a note that names the rank, and ValueError for another text."""
    if on == "threads":
        return list(run_threads(size, main, args=args))
    if on == "processes":
        return run_processes(size, main, args=args)
    if isinstance(on, str):
        raise ValueError(f"on={on!r}: ranks run on 'threads' or on 'processes'")  # noqa: TRY004 - the text is wrong
    return list(on.run(size, main, args=args))


Outcome: TypeAlias = Any
"""Tensors and numbers in nested mappings and sequences; names are joined by ` · `."""
_SHOWN = 8


class Disagreement(AssertionError):
    """Error for two outcomes that differ by more than the bound, or do not hold the same names and shapes."""


def agree(parallel: Outcome, single: Outcome, *, bound: float) -> None:
    """Check that `parallel` equals `single`, the trusted side, up to the relative difference `bound`, such as 1e-9.

    Raises Disagreement with the names that only one side has. If there are none, it names the first tensor over the
    bound, in the order of `single`, and the index of its largest difference. Raises TypeError for other values."""
    ours, theirs = dict(_leaves(parallel)), dict(_leaves(single))
    if ours.keys() != theirs.keys():
        raise Disagreement(_names(ours, theirs))
    families: dict[str, float] = {}
    for name, (family, tensor) in theirs.items():
        shapes = tuple(ours[name][1].shape), tuple(tensor.shape)
        if shapes[0] != shapes[1]:
            raise Disagreement(f"{name} has shape {shapes[0]} in parallel and {shapes[1]} alone")
        families[family] = max(families.get(family, 0.0), largest_magnitude(tensor))
    found: list[tuple[str, Difference]] = []
    for name, (family, tensor) in theirs.items():
        least = rounding_floor(families[family], bound=bound, dtype=tensor.dtype)
        if _within(ours[name][1], tensor, distance=bound * least):
            continue
        apart = difference(ours[name][1], tensor, floor=least)
        if apart.relative > bound:
            found.append((name, apart))
    if found:
        raise Disagreement(_report(found, bound, len(theirs)))


def _within(ours: Tensor, theirs: Tensor, *, distance: float) -> bool:
    """Return whether two tensors of fp64 differ by at most `distance`; False if a value is no finite number."""
    if not ours.dtype == theirs.dtype == torch.float64 or ours.device != theirs.device or not ours.numel():
        return False
    return float((ours.detach() - theirs.detach()).abs_().max()) <= distance


def _leaves(outcome: Outcome, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yield (name, (name of its family, tensor)) for every tensor and number of an outcome."""
    if isinstance(outcome, Tensor):
        yield " · ".join(path), (" · ".join(path[:-1]), outcome)
    elif isinstance(outcome, bool | int | float):
        yield " · ".join(path), (" · ".join(path), torch.tensor(float(outcome), dtype=torch.float64))
    elif isinstance(outcome, Mapping | Sequence) and not isinstance(outcome, str):
        for name, part in outcome.items() if isinstance(outcome, Mapping) else enumerate(outcome):
            yield from _leaves(part, (*path, str(name)))
    else:
        raise TypeError(
            f"{' · '.join(path) or 'the outcome'} is a {type(outcome).__name__}; an outcome holds tensors "
            "and numbers, in mappings and sequences"
        )


def _names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    missing = [name for name in theirs if name not in ours]
    extra = [name for name in ours if name not in theirs]
    lines = [
        f"  {side}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
        for side, names in (("only alone", missing), ("only in parallel", extra))
        if names
    ]
    return "\n".join(["the two outcomes do not hold the same tensors", *lines])


def _report(found: list[tuple[str, Difference]], bound: float, compared: int) -> str:
    name, first = found[0]
    width = max(len(name) for name, _ in found[:_SHOWN])
    where = f" at {list(first.index)}" if first.index else ""
    lines = [
        f"{name}: relative difference {first.relative:.3g}, bound {bound:.3g}",
        f"  {first.value:.17g} in parallel and {first.expected:.17g} alone{where}",
        f"  {len(found)} of {compared} tensors differ, the first of them:",
        *(f"    {name:<{width}}  {apart.relative:.3g}" for name, apart in found[:_SHOWN]),
    ]
    return "\n".join(lines)


RecordedSteps: TypeAlias = list[dict[str, Any]]
"""Figures of each step: `loss` (mean), `grad_norm` (before clipping), `tokens` (count of the loss), and `gradients` and
`parameters` (full tensors by name, copied to the CPU)."""


def outcome(trainer: Trainer, *, batches: Iterable[Any]) -> RecordedSteps:
    """Train one step on each global batch under a plan, and return the figures of every step, equal on every rank.

    Every rank calls it. The gradients of the mean loss are not clipped."""
    steps: RecordedSteps = []
    for batch in batches:
        result = trainer.step(batch)
        figures = {"loss": result.loss, "grad_norm": result.grad_norm, "tokens": result.tokens}
        gradients, parameters = _copies(trainer.full_gradients()), _copies(trainer.full_parameters())
        steps.append({**figures, "gradients": gradients, "parameters": parameters})
    return steps


def alone(
    model: nn.Module | Callable[[], nn.Module], *, loss: Loss, batches: Iterable[Any], **training: Any
) -> RecordedSteps:
    """Train one step on each global batch with a `ReferenceRun`, and return the figures that `outcome` returns.

    `training`: the optimizer, its arguments and the options, as in `parallelize`. Gradients are unclipped."""
    single = ReferenceRun(model, loss=loss, **training)
    steps: RecordedSteps = []
    for batch in batches:
        mean, tokens = single.backward(batch)
        gradients = _copies(single.gradients())
        figures = {"loss": mean, "grad_norm": single.update(), "tokens": tokens}
        steps.append({**figures, "gradients": gradients, "parameters": _copies(single.parameters())})
    return steps


def _copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


class Counts(dict[str, tuple[int, int]]):
    """Collectives of one rank: (calls, bytes) by `kind[axes]`. Prints as a table."""

    def __repr__(self) -> str:
        rows = [(name, f"{calls:,}", f"{size:,}") for name, (calls, size) in self.items()]
        return align_columns([("", "calls", "bytes"), *rows])

    def check(self, expected: Mapping[str, tuple[int, int]]) -> None:
        """Raise AssertionError, with both tables side by side, unless the rows equal `expected`."""
        if self == expected:
            return
        lines = [("", "calls", "expected", "bytes", "expected", "")]
        for name in sorted({*self, *expected}):
            here, there = self.get(name, (0, 0)), expected.get(name, (0, 0))
            mark = "" if here == there else "←"
            lines.append((name, f"{here[0]:,}", f"{there[0]:,}", f"{here[1]:,}", f"{there[1]:,}", mark))
        raise AssertionError(f"the collectives are not the expected ones\n{align_columns(lines)}")


def count(records: Iterable[CallRecord]) -> Counts:
    """Return the calls and bytes of one rank's recorded collectives, by kind and axes in alphabetical order."""
    rows: dict[str, tuple[int, int]] = {}
    for record in records:
        name = f"{record.kind}[{'·'.join(record.axes)}]"
        calls, size = rows.get(name, (0, 0))
        rows[name] = (calls + 1, size + record.bytes)
    return Counts(sorted(rows.items()))


class SavedForBackward(saved_tensors_hooks):
    """Context manager that measures the bytes that autograd saves inside it, without the parameters of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[int, int] = {}
        super().__init__(saved_bytes_hook(self._kept, parameters=model.parameters()), lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes saved so far: the sum of the sizes of all storages, each counted once."""
        return sum(self._kept.values())

    def __enter__(self) -> "SavedForBackward":  # type: ignore[override]
        super().__enter__()
        return self
