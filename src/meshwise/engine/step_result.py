"""Result of a training step, and the checks of a step: finite loss and gradients, matching batches and collectives."""

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.base import tensor_tree as tree
from meshwise.base.batch_norm_classes import RunningNorm
from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, disagreement, ranks_text
from meshwise.comm.api.streams import generator_states, restore_generators
from meshwise.data_parallel.stage_engines import Engine
from meshwise.engine.noise_scale import NoiseScale
from meshwise.expert.router_updates import RouterUpdates
from meshwise.model.forward import LossError
from meshwise.model.parameter_table import ParameterRow
from meshwise.precision.dtype_policy import LossScale, Precision


class NonFiniteError(RuntimeError):
    """Error for a step whose loss or gradient is not finite; no parameter was updated."""


@dataclass(frozen=True)
class SkipPolicy:
    """Policy for steps whose loss or gradient is not finite: raise an error, or skip some steps."""

    most: int
    """Number of such steps in a row that are skipped before NonFiniteError: 0 for `raise`, n for `skip:n`."""

    @classmethod
    def parse(cls, text: str) -> "SkipPolicy":
        """Return the policy for `raise` or `skip:<n>` with n > 0. Raises ValueError for any other text."""
        if text == "raise":
            return cls(0)
        word, _, number = text.partition(":")
        if word == "skip" and number.isdecimal() and int(number) > 0:
            return cls(int(number))
        raise ValueError(f"nonfinite={text!r}; write 'raise', or 'skip:3' to skip at most 3 such steps in a row")

    def advice(self, *, counted: bool) -> str:
        """Return advice for the user. `counted`: the loss had a count above 0."""
        if self.most:
            return f"; nonfinite='skip:{self.most}' allows no more such steps in a row"
        if not counted:
            return (
                "; the update was not applied. Look at the batch: it may have no rows, or only labels that the loss "
                "ignores (padding, ignore_index)"
            )
        return "; the update was not applied. Lower the learning rate, clip, check the batch, or use nonfinite='skip:3'"


def culprits(
    engine: Engine, *, axes: Sequence[str], run: Callable[[Callable[[int, ParameterRow, Tensor], None]], None]
) -> str:
    """Return as text, by rank, the parameters whose gradients or values are not finite. Every rank of `axes` calls it.

    `run(arrival)` repeats this rank's forward and backward, and calls `arrival(micro_batch, row, gradient)` for each
    gradient, with the micro-batch's number and the row of the parameter table."""
    own: list[tuple[int, str]] = []

    def look(micro_batch: int, row: ParameterRow, gradient: Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            own.append((micro_batch, row.name))

    run(look)
    order = {row.name: number for number, row in enumerate(engine.table.rows)}
    world = engine.world
    own.sort(key=lambda found: (found[0], -order[found[1]]))
    found = world.exchange((world.rank, len(own), own[:3]), axes=axes)
    reports = [
        f"rank {rank}: {', '.join(f'{name} (micro-batch {micro})' for micro, name in first)}"
        + (f" and {number - len(first)} more" if number > len(first) else "")
        for rank, number, first in found
        if number
    ]
    broken = [name for name, value in engine.full_parameters() if not bool(torch.isfinite(value).all())]
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    themselves = f"; parameters that are not finite themselves: {', '.join(broken[:3])}{more}" if broken else ""
    if not reports:
        return themselves + (
            "; every rank's own gradients are finite when the step is run again, so their sum overflowed or the model "
            "is not deterministic"
        )
    return f"; gradients that are not finite, nearest to the loss first: {'; '.join(reports)}{themselves}"


class StateBeforeUpdate:
    """Copy of running statistics and of torch's generators, restored when a step is skipped or raises."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [part for module in modules for part in module.modules() if isinstance(part, RunningNorm)]
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._random_states: Sequence[Tensor] = ()

    def keep(self) -> None:
        """Copy the state at the beginning of a step."""
        self._kept = [(each, each.clone()) for norm in self._norms for each in norm.buffers(recurse=False)]
        self._random_states = generator_states()

    def put_back(self) -> None:
        """Restore the state that `keep` copied."""
        restore_generators(self._random_states)
        for live, kept in self._kept:
            live.copy_(kept)


_LOOKED_AT = 64 << 10
"""Number of bytes at each end of a tensor that enter its digest."""


@dataclass(frozen=True)
class StepInputs:
    """Digest of the batch that a rank was given (or of an open step's losses), its rows, and the called collectives."""

    batch: int
    rows: int
    called: tuple[CallRecord, ...]
    frozen: Mapping[str, bool] | None = None
    """True by name for each parameter of this rank that is frozen; None if the ranks have agreed on them."""
    loss: float | None = None
    """Sum of the losses of an open step; None for another step."""


def batch_digest(batch: Any, *, contents: bool, before: int = 0) -> int:
    """Return a CRC-32 of the shapes and dtypes of a batch and, with `contents`, of each tensor's first and last 64 KiB.

    `before`: digest of the batches before this one. Reading the contents waits for the device. Meta and sparse tensors
    enter by shape and dtype only."""
    digest = before
    for tensor in tree.tensors(batch):
        digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        if contents and not tensor.is_meta and tensor.layout == torch.strided:
            flat, most = tensor.detach().reshape(-1), _LOOKED_AT // tensor.element_size()
            ends = flat if flat.numel() <= 2 * most else torch.cat([flat[:most], flat[-most:]])
            digest = zlib.crc32(bytes(ends.contiguous().cpu().view(torch.uint8).tolist()), digest)
    return digest


def mismatch_text(mesh: Mesh, *, found: Mapping[int, StepInputs], equal: Sequence[str]) -> str:
    """Return an error message: how frozen parameters, batches or collectives of the ranks differ, and what to change.

    Return "" if all differences are names of frozen parameters that other ranks do not hold. `equal`: axes of the mesh
    along which the batches have to be equal."""
    frozen = {(name, off) for given in found.values() for name, off in (given.frozen or {}).items()}
    for name in sorted(name for name, off in frozen if off and (name, False) in frozen):
        here = ranks_text([rank for rank, given in found.items() if (given.frozen or {}).get(name)])
        return f"requires_grad of {name!r} is False on {here} and True on others; set it to one value on every rank"
    for group in (group for group in mesh.groups(equal) if group[0] in found):
        parties: dict[tuple[int, int], list[int]] = {}
        for rank in group:
            parties.setdefault((found[rank].batch, found[rank].rows), []).append(rank)
        if len({repr(found[rank].loss) for rank in group}) > 1:
            losses = ", ".join(f"rank {rank}: {found[rank].loss:.7g}" for rank in group)
            return f"the ranks called step.backward with different losses ({losses}). {_OF_ALL_RANKS}"
        if len(parties) > 1 and found[group[0]].loss is None:
            had = ", ".join(f"{ranks_text(ranks)} a batch of {rows} rows" for (_, rows), ranks in parties.items())
            advice = _GLOBAL if set(equal) == set(mesh.names) else _LOCAL
            return f"the ranks were given different batches ({had}). {advice}"
    text = _first_disagreement(mesh, {rank: given.called for rank, given in found.items()})
    return text or ("" if frozen else "the ranks called different collectives before this step")


_SAMPLER = "DistributedSampler(dataset, num_replicas=trainer.replicas, rank=trainer.replica)"
_GLOBAL = (
    "step(batch) takes the global batch, the same on every rank, and gives each rank its own rows. For batches of this "
    f"rank's rows alone, call step(batch, local=True), and give the sampler the plan's replicas: {_SAMPLER}"
)
_LOCAL = (
    "These ranks train the same rows (tp and pp split the model, not the batch), so their local batches must be equal. "
    f"Give the sampler the plan's replicas, not world.size and world.rank: {_SAMPLER}"
)
_OF_ALL_RANKS = (
    "A backward adds up the gradients of all ranks, so the loss has to be the loss of the whole batch, the same number "
    "on every rank: loss = step.mean(loss_sum, count), with the sum over this rank's rows and the number of its terms"
)


def _first_disagreement(mesh: Mesh, called: Mapping[int, Sequence[CallRecord]]) -> str:
    meetings = dict.fromkeys(call.axes for calls in called.values() for call in calls if not call.point_to_point)
    for axes, ranks in [(met, ranks) for met in meetings for ranks in mesh.groups(met) if set(ranks) <= set(called)]:
        calls = {rank: [record for record in called[rank] if record.axes == axes] for rank in ranks}
        for number in range(max(len(records) for records in calls.values())):
            present = {rank: records[number] for rank, records in calls.items() if number < len(records)}
            missing = sorted(set(calls) - set(present))
            if (table := disagreement(present)) or missing:
                less = "" if not missing else f"\n  ranks {missing} called no more than {number} of them in this step"
                return f"the ranks called different collectives in this step:\n{table or ''}{less}"
    return ""


@dataclass(frozen=True)
class StepResult:
    """Result of one step, the same on every rank except for `seconds`.

    | loss        sum of the loss over the global batch, divided by its count
    | grad_norm   2-norm of the gradient of that loss over all logical parameters, before clipping
    | tokens      the count that `loss` returned, summed over the global batch
    | seconds     wall time of this rank's step
    | skipped     True when the update was not applied
    | problem     why the update was not applied; None when it was
    | loss_scale  factor of the mean loss in the backward (fp16); the other numbers are without this factor
    | noise       gradient noise, with `Options(noise=True)`; None for a skipped step, or micro-batches of several sizes
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool = False
    problem: str | None = None
    loss_scale: float = 1.0
    noise: NoiseScale | None = None


@dataclass(frozen=True)
class EvalResult:
    """Mean loss of an evaluation (sum over all batches / count; NaN for a count of 0), and the count, on every rank."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class StepTotals:
    """Sums over the global batch, the same on every rank."""

    loss: float
    """Sum of the loss."""
    count: float
    """Sum of the counts that `loss` returned."""
    squared: float
    """Squared 2-norm of the gradient of the summed loss, without the loss scale."""
    ranks: str = "every rank"
    """The ranks whose numbers are summed, as text: those of one replica where replicas step apart."""

    @property
    def mean(self) -> float:
        """The loss per count; NaN for a count of 0."""
        return self.loss / self.count if self.count else math.nan

    @property
    def norm(self) -> float:
        """The 2-norm of the gradient of the mean loss; NaN for a count of 0."""
        return math.sqrt(self.squared) / self.count if self.count and self.squared >= 0 else math.nan

    @property
    def overflowed(self) -> bool:
        """True if the loss is finite and its gradient is not."""
        return bool(self.count) and math.isfinite(self.mean) and not math.isfinite(self.squared)

    @property
    def problem(self) -> str | None:
        """Reason why the update must be skipped, as text; None if the update may be applied."""
        if not self.count:
            return f"the loss counted nothing in this step: {self.ranks} returned a count of 0"
        if math.isfinite(self.mean) and math.isfinite(self.norm):
            return None
        return f"the loss is {self.mean} and the gradient norm {self.norm}"

    def warn_if_gradient_is_zero(self, rank: int) -> None:
        """Warn, on rank 0 only, if every gradient is zero; plain torch raises an error for such a graph."""
        if not self.squared and rank == 0:
            warnings.warn(
                "the gradient of every parameter is 0 and nothing is learned: does the model or the loss break the "
                "graph, by .detach(), .item() or torch.no_grad()?",
                stacklevel=2,
            )


@dataclass(frozen=True)
class UpdateRecipe:
    """Settings by which a step turns its gradient into an update."""

    clip_norm: float | None
    """Largest 2-norm of the gradient; a larger gradient is scaled down to it. None: never."""
    nonfinite: SkipPolicy
    precision: Precision
    routers: RouterUpdates
    scale: LossScale | None = None
    """Loss scale of the first step; None for a precision without one."""
    noise: bool = False


def check_count(count: float) -> None:
    """Raise LossError for a sum of counts below 0 or not finite. NaN: a count in a tensor was below 0 or NaN."""
    if math.isnan(count):
        raise LossError("a count that loss returned is below 0 or NaN; each must be a finite number of at least 0")
    if not 0 <= count < math.inf:
        raise LossError(f"the counts that loss returned add up to {count}; each must be a finite number of at least 0")
