"""Modes of recomputation: the outputs that `selective` keeps, the cost of each mode, and the choice of modes.

docs/memory.md shows what a block keeps in each mode ("Recomputation"). `recompute.py` measures the extra seconds.
`choose_modes` chooses the modes that fit a memory budget. `selective` keeps the outputs of the operations in `KEPT`.
Products with weights take most of a block's time, and their outputs are comparatively small (Korthikanti et al., arXiv
2205.05198, section 4). `bmm` is computed again: the scores of unfused attention are large but cheap.

Two torch modes keep these outputs. `SavedOperations` sees the functions that Python code calls, at a cost of one
microsecond each. It runs those that may keep an output, or write to a kept one, inside `_KeptOutputs`. This mode sees
every operation inside them, at five microseconds each. The function and its arguments alone decide which outputs are
kept, so both forwards keep the same ones."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwise.base.package_table import package_table
from meshwise.comm.api.streams import StreamEvent, streams_of
from meshwise.model.forward import ForwardReplay
from meshwise.model.torch_private import LightDispatchMode, written_arguments
from meshwise.plan import PlanError

MODES = ("none", "selective", "full")
"""Modes of recomputation, from the one that keeps most memory to the one that keeps least."""


@dataclass(frozen=True)
class RecomputeCost:
    """Cost of one block by mode: bytes that it keeps and seconds of its recomputation, for one micro-batch.

    `in_flight`: largest number of micro-batches whose activations the block keeps at one time."""

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    in_flight: float = 1.0

    def kept(self, mode: str) -> int:
        """Return the bytes that the block keeps under `mode` for all micro-batches in flight."""
        return int(self.bytes[mode] * self.in_flight)

    def merged(self, other: "RecomputeCost") -> "RecomputeCost":
        """Return two measurements as one: for each mode the larger bytes and the shorter time."""
        return replace(
            self,
            bytes={mode: max(self.bytes[mode], other.bytes[mode]) for mode in MODES},
            seconds={mode: min(self.seconds[mode], other.seconds[mode]) for mode in MODES},
        )


def choose_modes(costs: Mapping[str, RecomputeCost], *, budget: int, allowed: Sequence[str]) -> dict[str, str]:
    """Return a mode of `allowed` for every block, so that all blocks together keep at most `budget` bytes.

    At first every block has the mode that keeps the fewest bytes. Then blocks change to modes that keep more, as long
    as the bytes fit; the block that saves the most seconds per byte comes first. Raises PlanError, with the smallest
    budget that works, if nothing fits."""
    chosen = {name: min(allowed, key=cost.kept) for name, cost in costs.items()}
    left = budget - sum(cost.kept(chosen[name]) for name, cost in costs.items())
    if left < 0:
        raise PlanError(
            f"budget={budget}: with all {len(costs)} blocks of this rank recomputed, {budget - left} bytes are kept. "
            f"Nearest that works: 'budget={-(-(budget - left) // 2**20)}M', or more microbatches"
        )
    while True:
        steps = [
            (cost.seconds[chosen[name]] - cost.seconds[mode], cost.kept(mode) - cost.kept(chosen[name]), name, mode)
            for name, cost in costs.items()
            for mode in allowed
        ]
        fitting = [step for step in steps if step[0] > 0 and step[1] <= left]
        if not fitting:
            return chosen
        _, size, name, mode = max(fitting, key=lambda step: step[0] / max(step[1], 1))
        chosen[name] = mode
        left -= size


def saved_bytes_hook(kept: dict[int, int], *, parameters: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a pack hook that writes the bytes of each saved storage to `kept`, by the storage's address.

    Storages of `parameters` are left out. The graph keeps the hook alive, so the hook must not hold the graph."""
    stored = {parameter.untyped_storage()._cdata for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in stored:
            kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # `tensor` itself would keep alive the operation that saved it: a cycle

    return keep


class DeviceTimer:
    """Timer of `with` blocks on a device. It sums their seconds; only `seconds` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._spans: list[tuple[StreamEvent, StreamEvent]] = []
        self._began = self._streams.event(timing=True)

    def __enter__(self) -> "DeviceTimer":
        self._began = self._streams.mark(timing=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._began, self._streams.mark(timing=True)))

    def seconds(self) -> float:
        """Wait for the device, and return the seconds of all `with` blocks in total."""
        self._streams.synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in self._spans)) / 1000


_TABLE = package_table("memory/kept_operations.toml")
KEPT = frozenset(f"aten::{name}" for name in _TABLE["operations"])
"""Schema names of the operations whose outputs are kept."""
_MULTIPLIES = frozenset(_TABLE["calls"])
"""Names of the functions and methods that run an operation in `KEPT`, in some cases at least."""


class SavedOperations(TorchFunctionMode):
    """Mode that keeps the outputs of the operations in `KEPT`, or takes them from `recall` in a repeated forward.

    The autograd functions of `tensor/core` call `recall.once` themselves for the products inside them."""

    def __init__(self, recall: ForwardReplay, *, clock: DeviceTimer | None = None) -> None:
        """`clock` measures the seconds of the operations in `KEPT`; None measures nothing."""
        super().__init__()
        self._kept = _KeptOutputs(recall, clock)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or not (name in _MULTIPLIES or _may_write(name, func, args, kwargs)):
            return func(*args, **kwargs)
        with self._kept:
            return func(*args, **kwargs)


def _may_write(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function may write to an argument: `x.add_`, `x += y`, `x[0] = y`, `out=`, `inplace=True`."""
    if name.endswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return (
        name.endswith("_")
        or "out" in kwargs
        or kwargs.get("inplace") is True
        or any(one is True for one in args)
        or isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    )


class _KeptOutputs(LightDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recall: ForwardReplay, clock: DeviceTimer | None) -> None:
        super().__init__()
        self._recall = recall
        self._clock = clock or contextlib.nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # flex_attention on a GPU: it is computed again
            return func(*args, **kwargs)
        schema = func._schema
        if schema.name in KEPT and torch.is_grad_enabled():
            with self._clock:
                return self._recall.once(lambda: func(*args, **kwargs))
        if schema.is_mutable:
            for tensor in written_arguments(func, args=args, kwargs=kwargs):
                self._recall.protect(tensor)
        return func(*args, **kwargs)
