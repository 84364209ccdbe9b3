"""ZeRO-3 gathers: parameters become whole just before a module needs them, and rest right after.

A unit is needed in the forward of its modules and in the backward of what those modules returned. It is freed when the
next unit is needed, not when its module returns. So a unit with two modules in a row is gathered once, and so is the
last unit of a forward that begins the backward. The backward of a single autograd thread runs nodes in the reverse
order of their creation. When it reaches the output of another unit, the last unit is complete.

    | forward     need A | need B: free A, start C | need C: free B, start D | ...
    | backward    need D | need C: start B | need B: free D ...

Where shards rest on another tier than the device, the one after what comes next is on its way from there already.

What comes next is what came next in the last pass: a wrong guess costs a gather, never a result. All ranks predict the
same, because all saw the same passes.

A unit whose module encloses another unit's (a parameter owned by the root, say) stays whole until the pass ends.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshwise.base.tensor_tree import reachable
from meshwise.data_parallel.live_unit import LiveUnit

_VALUES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""The attributes of a tensor that are views of its values; the others tell about it."""


class ParameterGatherer:
    """Keeps the right units of a model whole, by hooks on the modules that the parameter table names."""

    def __init__(self, module: nn.Module, *, units: Sequence[LiveUnit]) -> None:
        self._units = [unit for unit in units if unit.at_rest]
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
            self._handles.append(module.register_state_dict_pre_hook(_refuse_state_dict))
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_loading))

    @property
    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Inside it, a parameter used outside the modules of its unit is gathered on the spot."""
        return _Guard(self._owners, self._need_now) if self._owners else contextlib.nullcontext()

    def begin(self, *, backward: bool) -> None:
        """Begin a pass over the model."""
        self._finish_pass()
        self._backward = backward
        if not backward:
            self.rest()

    def rest(self) -> None:
        """End the passes and release every unit."""
        self._finish_pass()
        self._recorded = False
        self._open = []
        for unit in self._units:
            unit.free()
        self._whole = []

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Tell what happened when a backward inside meets parameters that rest."""
        try:
            yield
        except RuntimeError as error:
            if "out of bounds for storage of size 0" not in str(error):
                raise
            raise RuntimeError(
                "the backward reached a module whose parameters are spread over the ranks (zero=3): the tensors that "
                "the module returned were not found. Return them in a tuple, list, mapping, dataclass or attribute, or "
                "use a zero stage below 3"
            ) from error

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module, unit: LiveUnit) -> None:
        passed: list[dict[int, tuple[weakref.ref[torch.Tensor], int]]] = []

        def before(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            passed.append({id(x): (weakref.ref(x), x._version) for x in reachable((args, given)) if x.requires_grad})
            for outer in self._open:
                if outer is not unit:
                    outer.encloses = True
            self._open.append(unit)
            self._need(unit)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            was_there = passed.pop() if passed else {}
            if unit in self._open:
                self._open.remove(unit)
            if torch.is_grad_enabled():
                self._recorded = True
                for tensor in reachable(output):
                    # One that is only passed on has its gradient when the backward has long left this module. Others
                    # are not asked anything: logits that are split would be put together for an answer.
                    given, version = was_there.get(id(tensor), (None, 0))
                    changed = given is None or given() is not tensor or version != tensor._version
                    if tensor.requires_grad and changed:
                        tensor.register_hook(lambda _gradient: self._need(unit))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        # Always: activation checkpointing ends the forward it repeats, once it has what it needs, by an exception.
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _after_model(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.is_grad_enabled() and not self._recorded:
            self.rest()

    def _need(self, unit: LiveUnit) -> None:
        again = bool(self._seen) and self._seen[-1] is unit
        if not (again or unit.encloses):  # a second module of the same unit: what is on its way stays
            self._free_all_but(unit)
        if not again:
            self._seen.append(unit)
        self._make_whole(unit)
        if (follower := self._next()) is not None and follower not in self._whole:
            follower.start_gather()
            self._whole.append(follower)
        if (later := self._next(2)) is not None and later not in self._whole:
            later.fetch()
        self.peak = max(self.peak, sum(bucket.gathered for u in self._whole for bucket in u.buckets))

    def _need_now(self, unit: LiveUnit) -> None:
        # Also when it happens to be whole: nothing tells when the backward of this use comes, so it has to stay.
        self._recorded = self._recorded or torch.is_grad_enabled()
        if unit not in self._open:
            unit.encloses = True
            self._make_whole(unit)

    def _make_whole(self, unit: LiveUnit) -> None:
        unit.ready()
        if unit not in self._whole:
            self._whole.append(unit)

    def _free_all_but(self, unit: LiveUnit) -> None:
        for other in list(self._whole):
            if other is not unit and other not in self._open and not other.encloses:
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
    """Looks at the arguments of every torch function for a parameter of a unit that is gathered."""

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


def _refuse_state_dict(_module: nn.Module, prefix: str, _keep_vars: bool) -> None:  # noqa: FBT001 (torch calls it)
    raise RuntimeError(
        f"the parameters of {prefix or 'this model'} are spread over the ranks (zero=3), so state_dict() would hold "
        "none of them; iterate over trainer.full_parameters() on every rank instead"
    )


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"the parameters of this {type(module).__name__} are spread over the ranks (zero=3), so load_state_dict() "
        "cannot fill them; load before parallelize, or use trainer.load"
    )
