"""Bounds for the difference between two runs of a model: 1e-9 in float64, otherwise measured from rounding.

The growth of a rounding error depends on the model: batch norms over few values multiply it. An optimizer that divides
by the size of the gradient, as Adam does, turns the noise of a vanishing gradient into a full update. So the growth is
measured in a narrower precision, and in float64 after a difference over 1e-9. Two neighbours train the same model on
one process, from initial parameters that are each moved by one unit in the last place. By backward error analysis
(Higham, Accuracy and Stability of Numerical Algorithms, ch. 1), reordered sums are exact results for such neighbours.
So rounding explains the difference between a neighbour and the reference run, and the plan may differ as much:

    bound = max(least, 16 · the larger difference of both neighbours)
    least = 1e-9 in float64, else 16 eps of the narrowest dtype in the forward

If a gradient is small, rounding may choose the direction of its update. Small means: up to 16 times the difference of
the neighbours; in float64, up to the rounding of the largest gradient. After such an update, that element of the
parameter is not compared. An example is the bias of an attention's keys, whose exact gradient is zero."""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.world import World
from meshwise.data_parallel.batch_norm_statistics import batch_norms
from meshwise.engine.parallelize import Options
from meshwise.model.find_mixtures import compute_experts, find_mixtures
from meshwise.model.forward import Forward, Loss, default_forward
from meshwise.model.module_copy import copy_with_hooks
from meshwise.model.torch_private import TorchDispatchMode
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import LossScale, Precision, precision_of
from meshwise.testing import ReferenceRun, build_whole, difference, largest_magnitude, rounding_floor


class OutputMeanSquares:
    """Mean squares of the outputs of all modules, measured by hooks, to find the first where two forwards differ.

    They are the same for every split of the batch's rows. Run the model by the method `forward`."""

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
            # A function: a partial would be copied with a module that models share, and with it these models.
            module.register_forward_hook(lambda *given, name=name: self._add(name, *given))

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
        """Return the mean square of each module's output by name; with `world`, over all ranks, which all call this."""
        own = {name: (float(square), self._elements[name]) for name, square in self._squares.items()}
        squares: dict[str, float] = defaultdict(float)
        elements: dict[str, int] = defaultdict(int)
        for rank in [own] if world is None else world.exchange(own):
            for name, (square, count) in rank.items():
                squares[name] += square
                elements[name] += count
        return {name: squares[name] / count for name, count in elements.items() if count}

    def _add(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002 (a forward hook)
        if self._left <= 0 or torch.compiler.is_compiling():  # of a compiled block only the output is measured
            return
        for tensor in tensors(output):
            if tensor.is_floating_point():
                if bool(tensor.isnan().any()):  # NaN marks an output that another pipeline stage computes
                    continue
                square = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square()
                self._squares[name] = self._squares.get(name, 0.0) + square
                self._elements[name] = self._elements.get(name, 0) + tensor.numel()


class ChoiceGap(TorchFunctionMode):
    """Mode that measures how near to a tie the choices of routers were, in all calls of `topk` and `argmax`.

    `smallest`: smallest gap so far between the last chosen score and the next score, relative to the largest magnitude
    of the scores. Infinite if no call has left a score out."""

    smallest = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = {"topk": 2, "argmax": 1}.get(getattr(func, "__name__", ""))  # position of `dim` among the arguments
        if place and args and not args[0].is_meta and args[0].is_floating_point():
            scores = args[0].detach()
            dim = args[place] if len(args) > place else (kwargs or {}).get("dim", -1)
            size = 1 if isinstance(result, Tensor) else result[0].size(dim)
            if dim is not None and size < scores.size(dim):
                ordered = scores.sort(dim, descending=True).values
                gaps = ordered.select(dim, size - 1) - ordered.select(dim, size)
                largest = scores[scores.isfinite()].abs().max().clamp(min=torch.finfo(scores.dtype).tiny)
                self.smallest = min([self.smallest, *(gaps[gaps.isfinite()] / largest).tolist()])
        return result


FLOAT64_BOUND = 1e-9
"""Bound of every relative difference in float64."""
_ROUNDINGS, _MARGIN, _NEIGHBOURS = 16, 16, 2


@dataclass(frozen=True)
class TrialForward:
    """Facts found by forward passes on one process, before the comparison.

    | precision   the narrowest floating dtype in which the forward computed
    | where       name of the first operation with a result of this dtype
    | random      True if two passes of one batch gave different losses, or if some draws depend on the plan
    | drew        True if the model drew random numbers of any kind
    | unknown     operations whose random numbers depend on the plan
    | pooled      name of a module whose statistics over the batch depend on the micro-batches; empty without one"""

    precision: torch.dtype
    where: str
    random: bool
    drew: bool
    unknown: tuple[str, ...]
    pooled: str = ""


class _Narrowest(TorchDispatchMode):
    """Dispatch mode that records the narrowest floating dtype of the tensors that are computed from parameters.

    Other tensors, such as a count of tokens or a mask, are equal on both sides."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dtype = torch.float64
        self.where = ""
        self._made = WeakTensorKeyDictionary(dict.fromkeys(model.parameters(), None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(tensor in self._made for tensor in tensors((args, kwargs))):
            for tensor in tensors(result):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._made[tensor] = None
                    if torch.finfo(tensor.dtype).eps > torch.finfo(self.dtype).eps:
                        self.dtype, self.where = tensor.dtype, str(func)
        return result


def neighbours(model: nn.Module | Callable[[], nn.Module], *, seed: int, precision: torch.dtype) -> Iterator[nn.Module]:
    """Yield two copies of the model; each element of a parameter is moved up or down by eps of `precision`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_NEIGHBOURS):
        module = build_whole(model, seed=seed)
        with torch.no_grad():
            for parameter in module.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
                parameter.mul_(1 + torch.finfo(precision).eps * sign.to(parameter.dtype))
        yield module


@dataclass(frozen=True)
class BoundedDifference:
    """A measured relative difference, its bound, and its step, counted from 1 (0: before the first step)."""

    difference: float
    bound: float
    step: int

    @property
    def over(self) -> bool:
        """True if the difference is over its bound."""
        return self.difference > self.bound

    @property
    def excess(self) -> float:
        """The difference as a multiple of its bound."""
        return self.difference / self.bound if self.bound else math.inf if self.difference else 0.0


@dataclass(frozen=True)
class BoundJudge:
    """Rules for differences and bounds. `precision`: the dtype with the largest rounding error on either side.

    `measured`: True if neighbours measure the bounds in float64 too."""

    precision: torch.dtype
    measured: bool = False

    @property
    def exact(self) -> bool:
        """True if the bound is a constant; otherwise neighbours measure it."""
        return self.precision == torch.float64 and not self.measured

    @property
    def least(self) -> float:
        """The smallest bound, which holds where rounding does not grow."""
        return FLOAT64_BOUND if self.precision == torch.float64 else _ROUNDINGS * torch.finfo(self.precision).eps

    @property
    def tie_gap(self) -> float:
        """Relative gap between two scores below which rounding may decide which of them is the larger one."""
        return self.least / (1000 if self.precision == torch.float64 else 1)

    def floor(self, largest: float) -> float:
        """Return the magnitude below which a tensor is only rounding error; 0 unless in float64. `largest`: the largest
        magnitude of all tensors of its kind, gradients or values."""
        if self.precision != torch.float64:
            return 0.0
        return rounding_floor(largest, bound=FLOAT64_BOUND, dtype=self.precision)

    def measure(self, value: Tensor, *, sides: Sequence[Tensor], least: float, step: int) -> BoundedDifference:
        """Return the relative difference of `value` from the expected tensor, with the bound that the neighbours give.

        `sides`: the tensor in the trusted run, and then in its neighbours. `least`: the scale from `floor`."""
        expected, *neighbours = sides
        found = difference(value, expected, floor=least).relative
        spreads = [_MARGIN * difference(neighbour, expected, floor=least).relative for neighbour in neighbours]
        return BoundedDifference(found, max(self.least, *spreads, 0.0), step)

    def add_undecided(self, masks: dict[str, Tensor], *, sides: Sequence[Mapping[str, Tensor]]) -> None:
        """Add to `masks`, by name, the elements whose gradient is so small that rounding may decide its sign.

        `sides`: all gradients in the trusted run, and then in its neighbours. For such an element, an optimizer that
        divides by the size of the gradient makes a full update. So of this element only the gradient is compared."""
        largest = max(map(largest_magnitude, sides[0].values()), default=0.0)
        for name in sides[0]:
            if (mask := self._undecided([side[name] for side in sides], largest=largest)) is not None:
                masks[name] = mask | masks.get(name, False)

    def _undecided(self, sides: Sequence[Tensor], *, largest: float) -> Tensor | None:
        gradient, *neighbours = sides
        if self.exact:
            rounding, nonzero = gradient.abs() <= self.floor(largest) * FLOAT64_BOUND, gradient != 0
            if not rounding.all():
                rounding &= nonzero  # a zero among larger gradients is exact
            return rounding if rounding.any() and nonzero.any() else None
        spread = max(largest_magnitude(neighbour - gradient) for neighbour in neighbours)
        return gradient.abs() < _MARGIN * spread

    def __str__(self) -> str:
        if self.exact:
            return f"bound {FLOAT64_BOUND:g}"
        eps, name = torch.finfo(self.precision).eps, str(self.precision).removeprefix("torch.")
        least = f"{FLOAT64_BOUND:g}" if self.measured else f"{_ROUNDINGS} eps"
        return f"bound max({least}, {_MARGIN} x effect of one eps in the parameters), eps {eps:.1e} of {name}"


Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class VerificationInputs:
    """The model, loss, batches and settings of one call of `verify`, used by both sides.

    | dtype        dtype to which model and batches are converted; None: they keep theirs
    | training     keywords of `parallelize`: the optimizer, its arguments, the options
    | evaluating   True if the model is compared in eval mode"""

    model: Model
    loss: Loss
    batches: Sequence[Any]
    dtype: torch.dtype | None
    training: Mapping[str, Any]
    plan: Plan
    evaluating: bool = False

    @property
    def precision(self) -> Precision:
        """Dtypes of computation, masters and gradients on both sides."""
        return (self.training.get("options") or Options()).precision or precision_of(self.plan)

    @property
    def options(self) -> Options:
        """Options of both sides. A gradient that is not finite raises an error, so the loss scale is only 256."""
        options = self.training.get("options") or Options()
        return dataclasses.replace(options, nonfinite="raise", precision=self.precision, loss_scale=LossScale(256.0))

    def prepared(self) -> Model:
        """Return the model in the comparison's dtype and mode: a copy of the module, or a function that makes one."""

        def build() -> nn.Module:
            module = copy_with_hooks(self.model) if isinstance(self.model, nn.Module) else self.model()
            if self.evaluating:
                module.eval()
            if self.dtype == torch.float64:
                compute_experts(module, by="eager")
            return module if self.dtype is None else module.to(self.dtype)

        return build() if isinstance(self.model, nn.Module) else build

    def converted(self) -> Iterator[Any]:
        """Yield the batches, with floating tensors in the dtype of the comparison."""
        yield from map(self._convert, self.batches)

    def _convert(self, batch: Any) -> Any:
        dtype = self.dtype
        return map_tensors(lambda x: x.to(dtype) if dtype and x.is_floating_point() else x, batch)

    def arguments(self, outputs: OutputMeanSquares) -> dict[str, Any]:
        """Return keywords of `parallelize` and `ReferenceRun`: loss, optimizer, options. `outputs` runs the model."""
        example = self._convert(self.batches[0] if self.options.example is None else self.options.example)
        options = dataclasses.replace(self.options, forward=outputs.forward, example=example)
        return {**self.training, "loss": self.loss, "options": options}

    def listener(self) -> OutputMeanSquares:
        """Return a new `OutputMeanSquares` for this model's forward."""
        return OutputMeanSquares(self.options.forward or default_forward)

    def try_out(self, device: torch.device) -> TrialForward:
        """Run the first batch forward twice on one process, on `device`, and return the facts. If the losses differ,
        run again in eval mode. Raises ValueError if they differ in eval mode. Raises any error of model and loss."""
        single = ReferenceRun(self.prepared(), device=device, **self.arguments(self.listener()))
        in_eval_mode = dataclasses.replace(self, evaluating=True)
        pooled = [name for name, norm in batch_norms(single.model).items() if norm.training]
        if pooled and self.plan.microbatches > 1:
            return dataclasses.replace(in_eval_mode.try_out(device), pooled=pooled[0])
        batch = next(self.converted())
        try:
            with _Narrowest(single.model) as seen:
                first = single.evaluate(batch)
        except Exception as error:
            if self.dtype == torch.float64:
                others = "verify(dtype=None) keeps its own dtypes, dtype=torch.float32 converts it to float32"
                error.add_note(f"verify runs the model in float64. If it needs another dtype: {others}")
            raise
        apart = abs(first - single.evaluate(batch)) > _ROUNDINGS * torch.finfo(seen.dtype).eps * abs(first)
        unknown, drew = tuple(sorted(single.draws.unknown)), single.draws.drew
        if not (apart or unknown or (self.plan.random == "local" and drew)):
            return TrialForward(seen.dtype, seen.where, random=False, drew=drew, unknown=unknown)
        if self.evaluating:
            raise ValueError(
                "the same batch gives two different losses, in eval mode too. To be compared, forward and loss must be "
                "functions of the parameters and the batch: remove random numbers, or seed them from the batch"
            )
        return dataclasses.replace(in_eval_mode.try_out(device), random=True, unknown=unknown)

    def coarsest_dtype(self, trial: TrialForward) -> torch.dtype:
        """Return the dtype with the largest rounding error: of the forward, or of summing or accumulating gradients."""
        dtypes = (trial.precision, self.precision.reduction, self.precision.accumulation)
        return max((dtype for dtype in dtypes if dtype), key=lambda dtype: torch.finfo(dtype).eps)

    def notes(self, trial: TrialForward) -> Iterator[str]:
        """Yield the notes of the report, such as the reason for eval mode."""
        if self.options.expert_capacity:
            yield f"note: expert_capacity={self.options.expert_capacity} drops tokens on both sides: another model"
        if trial.pooled:
            yield (
                f"note: {trial.pooled} computes statistics of each micro-batch, and the plan cuts a batch into "
                f"{self.plan.microbatches}; the model was compared in eval mode, without these statistics"
            )
        elif self.evaluating:
            local = self.plan.random == "local"
            whose = "with random=local every rank draws its own" if local else "these depend on the plan"
            names = f" ({', '.join(trial.unknown)})" if trial.unknown else ""
            yield (
                f"note: the model draws random numbers in training{names}, and {whose}; it was compared in eval mode, "
                "without random numbers"
            )
        if self.dtype is not None and trial.precision != self.dtype:
            name = str(trial.precision).removeprefix("torch.")
            yield f"note: the forward computes in {name} (first in {trial.where}), which sets the bound"
