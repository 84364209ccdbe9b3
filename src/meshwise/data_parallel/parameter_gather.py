"""ZeRO-3 gathers: the parameters of a unit are gathered before its modules run, and freed when the next unit runs.

A unit runs in the forward of its modules and in the backward of their outputs. It is not freed when its module returns.
So a unit with two modules in a row is gathered once. The last unit of the forward is also the first of the backward,
and stays gathered between them. One autograd thread runs the nodes of a backward in the reverse order of their
creation. So when the backward reaches the output of another unit, the unit of the nodes before is complete.

    | forward     run A | run B: free A, prefetch C | run C: free B, prefetch D | ...
    | backward    run D | run C: free D, prefetch B | run B: free C, prefetch A | ...

The gather of the next unit starts while a unit runs. If shards are stored on the cpu or disk tier, the shard of the
unit after the next is already copied to the device.

The order of units in the last pass predicts the next unit. A wrong prediction costs one gather and changes no result.
All ranks predict the same unit, because all of them ran the same passes.

If a module of a unit contains a module of another unit, the outer unit stays gathered until the pass ends. An example
is the unit of a parameter that the root module owns."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshwise.base.tensor_tree import all_tensors
from meshwise.data_parallel.live_unit import LiveUnit

_VALUES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""Getters of tensor attributes that are views of the values; other getters read metadata such as shape and dtype."""


class ParameterGatherer:
    """Gathers and frees ZeRO-3 units by hooks on their modules. `peak`: most bytes of gathered units at once."""

    def __init__(self, module: nn.Module, *, units: Sequence[LiveUnit]) -> None:
        self._units = [unit for unit in units if unit.is_sharded]
        self._owners = {id(p): unit for unit in self._units for group in unit.parameters for p in group}
        self._whole: list[LiveUnit] = []
        self._open: list[LiveUnit] = []
        self._backward = False
        self._recorded = False
        self._passes: dict[bool, list[LiveUnit]] = {False: [], True: []}
        self._seen: list[LiveUnit] = []
        self.peak = 0
        self._handles: list[RemovableHandle] = []
        modules = dict(module.named_modules(remove_duplicate=False))
        for unit in self._units:
            for name in unit.spec.modules:
                self._watch(modules[name], unit)
        if self._units:
            self._handles.append(module.register_forward_hook(self._after_model, always_call=True))

    @property
    def gather_on_use(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a parameter that is used outside the modules of its unit is gathered at once."""
        return _Guard(self._owners, self._need_now) if self._owners else contextlib.nullcontext()

    def begin_pass(self, *, backward: bool, keep: bool = False) -> None:
        """End the previous pass, and begin a forward or backward. A forward first frees every unit, unless `keep`."""
        self._finish_pass()
        self._backward = backward
        if not (backward or keep):
            self.free_all()

    def free_all(self) -> None:
        """End the pass and free every unit."""
        self._finish_pass()
        self._recorded = False
        self._open = []
        for unit in self._units:
            unit.free()
        self._whole = []

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Inside it, an error from a backward that uses freed parameters is raised again with its cause and remedy."""
        try:
            yield
        except RuntimeError as error:
            if "out of bounds for storage of size 0" not in str(error):
                raise
            raise RuntimeError(
                "the backward needs parameters that are spread over the ranks (zero=3) and are not gathered: no tensor "
                "was found in the result of their module. Return tensors in a tuple, list, mapping, dataclass or "
                "attribute, or use a zero stage below 3"
            ) from error

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module, unit: LiveUnit) -> None:
        passed: list[dict[int, tuple[weakref.ref[torch.Tensor], int]]] = []

        def before(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            passed.append({id(x): (weakref.ref(x), x._version) for x in all_tensors((args, given)) if x.requires_grad})
            for outer in self._open:
                if outer is not unit:
                    outer.stays_gathered = True
            self._open.append(unit)
            self._need(unit)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            was_there = passed.pop() if passed else {}
            if unit in self._open:
                self._open.remove(unit)
            if torch.is_grad_enabled():
                self._recorded = True
                for tensor in all_tensors(output):
                    # An input that the module returns unchanged gets no hook: its gradient is complete only after the
                    # backward of this module. `_version` tells if an input was changed.
                    given, version = was_there.get(id(tensor), (None, 0))
                    changed = given is None or given() is not tensor or version != tensor._version
                    if tensor.requires_grad and changed:
                        tensor.register_hook(lambda _gradient: self._need(unit))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        # always_call: activation checkpointing stops a repeated forward early by an exception.
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _after_model(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.is_grad_enabled() and not self._recorded:
            self.free_all()

    def _need(self, unit: LiveUnit) -> None:
        again = bool(self._seen) and self._seen[-1] is unit
        if not (again or unit.stays_gathered):  # again: a second module of the same unit, so the prefetched unit stays
            self._free_all_but(unit)
        if not again:
            self._seen.append(unit)
        self._make_whole(unit)
        if (follower := self._next()) is not None and follower not in self._whole:
            follower.start_gather()
            self._whole.append(follower)
        if (later := self._next(2)) is not None and later not in self._whole:
            later.fetch_shards()
        self.peak = max(self.peak, sum(bucket.gathered for u in self._whole for bucket in u.buckets))

    def _need_now(self, unit: LiveUnit) -> None:
        # No hook announces the backward of this use, so the unit stays gathered until the pass ends.
        self._recorded = self._recorded or torch.is_grad_enabled()
        if unit not in self._open:
            unit.stays_gathered = True
            self._make_whole(unit)

    def _make_whole(self, unit: LiveUnit) -> None:
        unit.ready()
        if unit not in self._whole:
            self._whole.append(unit)

    def _free_all_but(self, unit: LiveUnit) -> None:
        for other in list(self._whole):
            if other is not unit and other not in self._open and not other.stays_gathered:
                other.free()
                self._whole.remove(other)

    def _next(self, ahead: int = 1) -> LiveUnit | None:
        here, last = len(self._seen) - 1, self._passes[self._backward]
        if here + ahead < len(last) and last[here] is self._seen[here]:
            return last[here + ahead]
        return None

    def _finish_pass(self) -> None:
        if self._seen:
            self._passes[self._backward] = self._seen
        self._seen = []


class _Guard(TorchFunctionMode):
    """Calls `need` with the unit of each ZeRO-3 parameter that is an argument of a torch function."""

    def __init__(self, owners: dict[int, LiveUnit], need: Callable[[LiveUnit], None]) -> None:
        super().__init__()
        self._owners = owners
        self._need = need

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUES or getattr(func, "__name__", "") not in ("__get__", "__set__"):
            self._look(args)
            if kwargs:
                self._look(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            unit = self._owners.get(id(value))
            if unit is not None:
                self._need(unit)
            elif isinstance(value, list | tuple):
                self._look(value)
