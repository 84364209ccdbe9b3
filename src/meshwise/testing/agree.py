"""Check that a training under a plan and the same training on one process have equal figures (`agree`).

An outcome holds the figures to compare, by name: tensors and numbers in nested mappings and sequences.

    {"loss": 2.31, "grad_norm": 0.8, "gradients": {"embed.weight": Tensor, …}, "parameters": {…}}

Two outcomes agree when they hold the same names, and the relative difference of every pair of tensors (see
`difference`) is at most the bound. The tensors of one mapping or sequence are a family. The largest element of a family
sets the scale below which a value is only rounding. Each number is its own family.

`run` runs a function on N ranks, as threads of this process or as processes. `outcome` trains a few steps under a plan,
`alone` on one process; both record all figures for `agree`.

The collectives of a block of code, and the bytes that autograd saves in it, are counted to compare with formulas:

    with world.record() as records:
        trainer.step(batch)
    count(records).check({"reduce_scatter[dp]": (2, 8 * psi), "all_gather[dp]": (2, 8 * psi), …})

The name of a row is the kind and the axes, as a call record prints: `kind[axis·axis]`. Its value is (calls, bytes). The
bytes are the payload of the whole collective as one rank sees it.

    with SavedForBackward(model) as saved:
        model(batch)
    assert saved.bytes == layers * bytes_per_layer

Peak memory of a process mixes activations with parameters, buffers and the allocator's cache. The saved bytes are exact
and equal on every machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.base.text_format import align_columns
from meshwise.comm import run as run_processes
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.in_process.thread_world import run_threads
from meshwise.engine.trainer import Trainer
from meshwise.model.forward import Loss
from meshwise.testing.reference_run import Difference, ReferenceRun, difference, largest_magnitude, rounding_floor


class RankRunner(Protocol):
    """Protocol of an object that runs ranks in its own way, such as in processes that it reuses between calls."""

    def run(self, size: int, main: Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call `main(world, *args)` on `size` ranks, and return the results by rank."""


def run(
    size: int,
    main: Callable[..., Any],
    *,
    on: Literal["threads", "processes"] | RankRunner = "threads",
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """Call `main(world, *args)` on `size` ranks, and return the results by rank.

    `on` is "threads" (starts in milliseconds, takes any callable), "processes" (starts in seconds; `main` must be at
    the top level of a module, see `meshwise.run`), or a `RankRunner`. Raises the error of the first rank that failed,
    with a note that names the rank, and ValueError for another `on`."""
    if on == "threads":
        return list(run_threads(size, main, args=args))
    if on == "processes":
        return run_processes(size, main, args=args)
    if isinstance(on, str):
        raise ValueError(  # noqa: TRY004 - the type is allowed, the value is not
            f"on={on!r}: ranks run on 'threads', on 'processes', or on an object with a method `run`"
        )
    return on.run(size, main, args=args)


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
        apart = difference(ours[name][1], tensor, floor=least)
        if apart.relative > bound:
            found.append((name, apart))
    if found:
        raise Disagreement(_report(found, bound, len(theirs)))


def _leaves(outcome: Outcome, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yield (name, (name of its family, tensor)) for every tensor and number of an outcome."""
    if isinstance(outcome, Tensor):
        yield " · ".join(path), (" · ".join(path[:-1]), outcome)
    elif isinstance(outcome, bool | int | float):
        yield " · ".join(path), (" · ".join(path), torch.tensor(float(outcome), dtype=torch.float64))
    elif isinstance(outcome, Mapping):
        for name, part in outcome.items():
            yield from _leaves(part, (*path, str(name)))
    elif isinstance(outcome, Sequence) and not isinstance(outcome, str):
        for index, part in enumerate(outcome):
            yield from _leaves(part, (*path, str(index)))
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
    steps = []
    for batch in batches:
        result = trainer.step(batch)
        steps.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "gradients": _copies(trainer.full_gradients()),
                "parameters": _copies(trainer.full_parameters()),
            }
        )
    return steps


def alone(
    model: nn.Module | Callable[[], nn.Module], *, loss: Loss, batches: Iterable[Any], **training: Any
) -> RecordedSteps:
    """Train one step on each global batch with a `ReferenceRun`, and return the figures that `outcome` returns.

    `training`: the optimizer, its arguments and the options, as in `parallelize`. Gradients are unclipped."""
    single = ReferenceRun(model, loss=loss, **training)
    steps = []
    for batch in batches:
        mean, tokens = single.backward(batch)
        gradients = _copies(single.gradients())
        norm = single.update()
        parameters = _copies(single.parameters())
        steps.append(
            {"loss": mean, "grad_norm": norm, "tokens": tokens, "gradients": gradients, "parameters": parameters}
        )
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
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes saved so far: the sum of the sizes of all storages, each counted once."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def __enter__(self) -> "SavedForBackward":  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._parameters:
            self._kept.setdefault(place, tensor)
        return tensor
