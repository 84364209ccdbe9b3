"""Train an unsplit model on one process, in plain torch, to compare a plan with it (`ReferenceRun`).

The project's own engine on one rank could make the same mistakes as on many ranks. So the reference is the usual loop:

    | output = model(batch)
    | total, count = loss(output, batch)          # over the whole global batch
    | (total / count).backward()
    | norm = clip_grad_norm_(parameters, …)       # torch's own
    | optimizer.step()                            # torch's own, over the full tensors

Three rules are the same as in the engine. A parameter that the loss did not reach has the gradient zero (torch's
optimizers would skip it, and its weight decay). A parameter with a wider master is updated in the master, then rounded.
Dropout is the same function of seed, step, sample and place.

`difference` is the relative difference of two tensors, as `agree` and `verify` define it:

    relative difference of a and b  =  max |a − b|  /  max(max |b|, floor)

b is the trusted side. The full tensor has one scale. An element that is small by cancellation has the rounding error of
its large terms, and an element-wise ratio would report this error as a difference.

The floor is for tensors in which every element is small. An example is the bias of an attention's keys: softmax does
not depend on it, so its gradient is zero. The computed gradient is only rounding, under any plan: about 1e-18 where
other gradients are 1e-2. A family of tensors, such as all gradients, gives the scale below which a tensor is rounding:

    floor  =  max |b| of the family  ·  128 eps / bound

In float64 with the bound 1e-9 the floor is 3e-5 of the family's largest element."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwise.attention.context_parallel import ContextParallel, token_rules
from meshwise.base.tensor_tree import map_tensors, row_count
from meshwise.comm.in_process.trace_world import TraceWorld
from meshwise.engine.parallelize import Options
from meshwise.expert.router_updates import RouterUpdates
from meshwise.model.deferred_init import build_with_values, install
from meshwise.model.forward import Loss, call_loss, default_forward
from meshwise.model.full_parameter_access import WholeParameters
from meshwise.model.module_copy import copy_with_hooks
from meshwise.model.parameter_table import matrices_decay, parameter_table
from meshwise.model.random_draws import RandomDraws, SampleRows
from meshwise.optim.flat_optimizer import default_options, needs_whole
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import CastHooks, Precision, autocast_context, convert, widen_for_loss

_ROUNDINGS = 128


@dataclass(frozen=True)
class Difference:
    """Largest difference of two tensors, relative as above, its index in the tensor, and both values there."""

    relative: float = 0.0
    index: tuple[int, ...] = ()
    value: float = 0.0
    expected: float = 0.0

    def __str__(self) -> str:
        where = f" at {list(self.index)}" if self.index else ""
        return f"{self.relative:.1e}{where}: {self.value:.17g} and {self.expected:.17g}"


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
        self.model = whole(model, seed=self._options.seed).to(self._device)
        own = default_options(optimizer, module=self.model)
        rule = self._options.parameter_options or own or matrices_decay
        self._precision = self._options.precision or Precision()
        unrounded = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        convert(self.model, precision=self._precision)
        CastHooks(self.model, precision=self._precision)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.masters = {name: self._master(p, unrounded[name]) for name, p in self._trained.items()}
        groups = [{"params": [p], **rule(name, self._trained[name])} for name, p in self.masters.items()]
        if needs_whole(optimizer):
            optimizer_arguments["logical"] = WholeParameters(self.masters)
        self.optimizer = optimizer(groups, **optimizer_arguments)
        rules = token_rules(self._options.tensor_rules)
        tokens = None
        if rules:
            one_rank = TraceWorld(rank=0, mesh=Plan().mesh(), device=self._device)
            tokens = ContextParallel(Plan(), world=one_rank, rules=rules, dense=True)
        self.draws = RandomDraws(self.model, seed=self._options.seed, tokens=None if tokens is None else tokens.mode)
        if tokens is not None:
            tokens.attention.draws = self.draws
            tokens.install(self.model)
        self._routers = RouterUpdates(rate=self._options.expert_bias_rate, device=self._device)
        self._routers.follow(self.model)
        self._steps = 0

    def backward(self, batch: Any) -> tuple[float, float]:
        """Run forward and backward of a global batch, and return the mean loss and its count. Replaces old gradients.

        Raises ValueError when `loss` does not return (sum, count), or counts nothing."""
        self.model.zero_grad()
        self._routers.begin()
        total, counted = self._run(batch)
        with self.draws.running(_all_of(batch), again=True):
            (total / counted).backward()
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
        with self.draws.running(_all_of(batch)):
            with autocast_context(self._precision, device=self._device):
                output = forward(self.model, batch)
            output = output if self._precision.computes is None else widen_for_loss(output)
            total, count = call_loss(self.model, batch, forward=lambda _model, _batch: output, loss=self._loss)
        if not float(count):
            raise ValueError("the loss counted nothing in this batch: it returned a count of 0")
        return total, float(count)

    def _master(self, parameter: nn.Parameter, unrounded: Tensor) -> nn.Parameter:
        """Return the parameter that the optimizer updates: a new master, or `parameter` itself if dtypes are equal."""
        dtype = self._precision.master_of(parameter.dtype)
        return parameter if parameter.dtype == dtype else nn.Parameter(unrounded.to(dtype))

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
        """Yield (name, value) of every parameter, frozen or not; a tied parameter once, under its first name."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()


def whole(model: nn.Module | Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Return the model with all its values on the CPU, initialized as under every plan; a module is copied."""
    source = build_with_values(copy_with_hooks(model) if isinstance(model, nn.Module) else model, seed=seed)
    source.fill_buffers()
    for row in parameter_table(source.module).rows:
        install(source.module, row=row, tensor=source.full(row.name).detach().clone())
    return source.module


def _all_of(batch: Any) -> SampleRows:
    return SampleRows(0, row_count(batch))
