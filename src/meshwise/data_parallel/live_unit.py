"""Parameters of one unit (modules gathered together) on this rank: gather and free them, and take their gradients.

`UnitGradients` takes the gradients of a unit from `.grad` all at once, with one hook per unit.

Autograd leaves a new gradient in `.grad` without a copy. docs/architecture.md shows how the hook moves to the parameter
whose gradient arrives last ("Hooks of the model"). Hooks also stay on the first and the last parameter, where this rank
makes progress in collectives, and on those with the user's own hook for accumulated gradients, which may remove it.

ZeRO-3 gathers: the parameters of a unit are gathered before its modules run, and freed when the next unit runs.

A unit runs in the forward of its modules and in the backward of their outputs. It is not freed when its module returns.
So a unit whose two modules run in succession is gathered once. The last unit of the forward is also the first of the
backward, and stays gathered between them. One autograd thread runs the nodes of a backward in the reverse order of
their creation. So when the backward reaches the output of another unit, the backward of the unit before has ended.

    | forward     run A | run B: free A, prefetch C | run C: free B, prefetch D | ...
    | backward    run D | run C: free D, prefetch B | run B: free C, prefetch A | ...

The gather of the next unit starts while a unit runs; under `prefetch=N`, the gathers of the next N units. If shards are
stored on the cpu or disk tier, the shard of the unit after these is already copied to the device.

The order of units in the last pass predicts the next unit. A wrong prediction costs one gather and changes no result.
All ranks predict the same unit, because all of them ran the same passes.

A unit stays gathered until the pass ends if one of its modules contains a module of another unit, as the root module
does that owns a parameter. It also stays if a module returns a view of a parameter."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshwise.base.mesh import Mesh
from meshwise.base.tensor_tree import all_tensors
from meshwise.comm.api.world import Work, World, wait_all
from meshwise.data_parallel.bucket import Bucket, StorageConfig
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.parameter_table import ParameterRow, ParameterUnit

GradientCallback: TypeAlias = Callable[[ParameterRow, Tensor], None]
"""Callback `(row, gradient)` that receives each gradient of this rank before reduction, instead of the bucket."""

_SHARED = "the ranks of this host share one copy of it, so that each of them would write to it"


class LiveUnit:
    """Buckets of one unit, and the module's parameters that view them.

    While a ZeRO-3 unit is freed, each parameter is a NaN expanded to its shape, so that an unexpected use shows as NaN.
    Under `overlap_gather` trained parameters are NaN too, from an update until `ready` has waited for them.

    | spec         the unit's rows of the parameter table
    | rows         rows of the parameters, in the order of `parameters`: bucket by bucket
    | parameters   parameters of the module, per bucket in piece order
    | is_sharded   True if some parameters exist only as shards between uses (ZeRO-3)
    | overlaps     True if some parameters are awaited in the forward after their update (`overlap_gather`)
    | whole        True while the parameters have their values; always True without ZeRO-3 and `overlap_gather`
    | stays_gathered   True if the unit is freed only at the end of a pass, not when the next unit runs"""

    def __init__(self, spec: ParameterUnit, *, world: World, storage: StorageConfig) -> None:
        self.spec = spec
        kind = partial(_kind, mesh=world.mesh)
        alike = [list(group) for _, group in groupby(sorted(spec.rows, key=kind), key=kind)]
        self.buckets = [Bucket(rows, world=world, storage=storage) for rows in alike]
        self.rows = [piece.row for bucket in self.buckets for piece in bucket.place.pieces]
        self.is_sharded = any(bucket.is_sharded for bucket in self.buckets)
        self.overlaps = any(bucket.overlaps for bucket in self.buckets)
        self.parameters: list[list[nn.Parameter]] = []
        self._unused: list[list[Tensor]] = []
        self._used: list[list[Tensor]] | None = None
        self._state: list[list[tuple[Any, ...]]] = []
        self._touched = False
        self.whole = True
        self.stays_gathered = False
        self._gathering: list[Work] = []

    def load(self, source: ParameterSource, *, place: Callable[[ParameterRow, Tensor], nn.Parameter]) -> None:
        """Fill the buckets with values from `source` (collectives), and make the module's parameters view them.

        place: puts a tensor into the module as the parameter of a row, and returns this parameter."""
        for bucket in self.buckets:
            world, pieces = bucket.world, bucket.place.pieces
            holders = world.mesh.others(dict(pieces[0].row.held_at))
            bucket.fill(source.broadcast_full(piece.row.name, world=world, axes=holders) for piece in pieces)
            self._unused.append(self._between_uses(bucket))
            values = bucket.views() if bucket.overlaps else self._unused[-1]
            # `.data` has a separate version counter, which writes to the buffer do not change.
            self.parameters.append([place(piece.row, value.data) for piece, value in zip(pieces, values, strict=True)])
        self.whole = not self.is_sharded
        self._state = [[(p.requires_grad, p._version, p.data_ptr()) for p in group] for group in self.parameters]

    def change_message(self, *, fixed_by: str) -> str:
        """Return an error message with its remedy if a parameter was changed or written to since `load`, else "".

        fixed_by: see `Engine.fixed_by`. Call this method between two steps. It does not notice writes to a parameter
        that each forward sets (`set_in_forward`)."""
        for bucket, parameters, state in zip(self.buckets, self.parameters, self._state, strict=True):
            if state == [(one.requires_grad, one._version, one.data_ptr()) for one in parameters]:
                continue
            self._touched = True
            freed = (bucket.is_sharded or bucket.overlaps) and not self.whole
            memory = bucket.whole.untyped_storage().data_ptr()
            for piece, parameter, (_, version, _) in zip(bucket.place.pieces, parameters, state, strict=True):
                name, held = piece.row.name, parameter.untyped_storage()
                if parameter.requires_grad and not bucket.trainable:
                    return (
                        f"{name!r} was frozen when the model was parallelized, so it has no room for gradients; build "
                        "the model with it trainable, and freeze it after parallelize: "
                        "for name, p in trainer.model.named_parameters(): p.requires_grad_('head' in name)"
                    )
                if fixed_by and bucket.trainable and not parameter.requires_grad:
                    return (
                        f"requires_grad of {name!r} was turned off, and {fixed_by} moves parameters without a gradient "
                        "too; freeze it before parallelize, or turn it on again"
                    )
                gone = held.nbytes() != bucket.dtype.itemsize if freed else held.data_ptr() != memory
                if gone or parameter.dtype != bucket.dtype:
                    return (
                        f"the tensor of {name!r} was replaced after the model was parallelized, so the model no longer "
                        "uses the tensor that is trained; set values, dtypes and devices before parallelize"
                    )
                written = parameter._version != version and not piece.row.set_in_forward
                if written and (bucket.has_master or bucket.shared):
                    why = "the next step would overwrite it from its float32 copy" if bucket.has_master else _SHARED
                    return (
                        f"{name!r} was written to after the model was parallelized, and {why}; set values before "
                        "parallelize, or load them with trainer.load"
                    )
        return ""

    def follow_requires_grad(self) -> dict[nn.Parameter, list[nn.Parameter]] | None:
        """Freeze and unfreeze as `change_message` has found; return the parts that `Bucket.cut` made, or None."""
        parts: dict[nn.Parameter, list[nn.Parameter]] | None = None
        for number, (bucket, parameters) in enumerate(zip(self.buckets, self.parameters, strict=True)):
            off = [bucket.trainable and not one.requires_grad for one in parameters] if self._touched else bucket.frozen
            if off != bucket.frozen:
                bucket.frozen = off
                parts = (parts or {}) | bucket.cut(off)
                known = zip(parameters, self._state[number], strict=True)
                self._state[number] = [(one.requires_grad, *others) for one, (_, *others) in known]
        self._touched = False
        return parts

    def fetch_shards(self) -> None:
        """Start to copy the shards from their tiers to the device, unless the unit is gathered or being gathered."""
        if not (self.whole or self._gathering):
            for bucket in self.buckets:
                if bucket.is_sharded:
                    bucket.fetch_shard()

    def release_shards(self) -> None:
        """Release the device copies of all shards from other tiers."""
        for bucket in self.buckets:
            bucket.release_shard()

    def start_gather(self, *, exact: bool = False) -> None:
        """Start to gather the parameters, as in `Bucket.gather`; do nothing if that is done or under way."""
        if not (self.whole or self._gathering):
            self._gathering = [bucket.gather(exact=exact) for bucket in self.buckets if bucket.is_sharded]

    def ready(self, *_: Any) -> None:
        """Wait until the parameters are gathered, and set them in the module; start the gather if needed."""
        if self.whole:
            return
        self.start_gather()
        wait_all(self._gathering)
        self._gathering = []
        self.release_shards()
        self.whole = True
        if self._used is None:
            self._used = [bucket.views() for bucket in self.buckets]
        self._show(self._used)

    def receive_update(self, works: list[Work]) -> None:
        """Receive updated parameters from `works`: wait for them now, or under `overlap_gather` in `ready`."""
        if self.overlaps:
            self.whole, self._gathering = False, works
            self._show(self._unused)
        else:
            wait_all(works)

    def free(self) -> None:
        """Free the gathered parameters; the module's parameters then read as NaN. Does nothing without ZeRO-3."""
        if not self.is_sharded or not (self.whole or self._gathering):
            self.release_shards()
            return
        self.ready()
        self.whole = False
        self._show(self._unused)
        for bucket in self.buckets:
            bucket.free()

    def trainable(self) -> Iterator[tuple[Bucket, int, nn.Parameter]]:
        """Yield (bucket, index in the bucket, parameter) of every trainable parameter."""
        for bucket, parameters in zip(self.buckets, self.parameters, strict=True):
            if bucket.trainable:
                for index, parameter in enumerate(parameters):
                    yield bucket, index, parameter

    def _show(self, values: list[list[Tensor]]) -> None:
        for parameters, tensors in zip(self.parameters, values, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor

    @staticmethod
    def _between_uses(bucket: Bucket) -> list[Tensor]:
        """Return the module's tensors between uses: NaN with ZeRO-3 or `overlaps`, views of the bucket otherwise."""
        if not (bucket.is_sharded or bucket.overlaps):
            return bucket.views()
        value = float("nan") if bucket.dtype.is_floating_point or bucket.dtype.is_complex else 0
        with torch.inference_mode(mode=False):  # a meta parameter cannot take an inference tensor as data
            nothing = torch.full((), value, dtype=bucket.dtype, device=bucket.device)
        return [nothing.expand(piece.shape) for piece in bucket.place.pieces]


class UnitGradients:
    """Gradients of one unit during a backward.

    | unit       the unit, which has at least one trainable parameter
    | complete   True once all gradients that are expected in this backward have been taken"""

    def __init__(
        self, unit: LiveUnit, *, on_complete: Callable[["UnitGradients"], None], progress: Callable[[], object] | None
    ) -> None:
        """`on_complete` is called when the last expected gradient has arrived; it calls `take`.

        `progress` is called at the hooks before; None: only at the last one."""
        self.unit = unit
        self.complete = False
        self._on_complete = on_complete
        self._progress = progress
        self._by_bucket = [each for each in zip(unit.buckets, unit.parameters, strict=True) if each[0].trainable]
        self._parameters = [parameter for _, parameters in self._by_bucket for parameter in parameters]
        self._all = self._expected = self._parameters
        self._active = False
        self._in_place: dict[int, nn.Parameter] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._last = self._parameters[0]
        self._stay = () if progress is None else (self._parameters[0], self._parameters[-1])
        for parameter in (self._last, *self._stay):
            self._watch(parameter)

    def begin_step(self) -> None:
        """Discard earlier gradients, and put the hooks behind those that the user has registered since."""
        self.stop()
        for parameter in self._all:
            parameter.grad = None
        self._expected = self._parameters = [each for each in self._all if each.requires_grad]
        if self._parameters and not self._last.requires_grad:
            self._move(self._parameters[0])
        for parameter in [each for each in self._parameters if each._post_accumulate_grad_hooks]:
            self._watch(parameter)

    def expect(self, leaves: set[int] | None, *, in_place: bool = False) -> bool:
        """Expect gradients of all parameters, or of those with an id in `leaves`; return True if fewer than all.

        `in_place`: until `stop`, autograd adds to the accumulated gradients, except where the user has hooks."""
        if self._parameters and self._all_in_place:
            return False
        trained = self._parameters
        self._expected = trained if leaves is None else [each for each in trained if id(each) in leaves]
        self.complete, self._active = not self._expected, True
        if leaves is not None and self._expected and id(self._last) not in leaves:
            self._move(self._expected[0])
        for bucket, parameters in self._by_bucket if in_place and not self._in_place else ():
            for parameter, view in zip(parameters, bucket.accumulated_views(), strict=True):
                hooks = parameter._post_accumulate_grad_hooks or ()
                if view is not None and len(hooks) == (id(parameter) in self._handles):
                    parameter.grad, self._in_place[id(parameter)] = view, parameter
        if self._all_in_place:
            self._remove_hooks()
        return len(self._expected) < len(self._parameters)

    @property
    def _all_in_place(self) -> bool:
        """True while autograd adds every gradient to the accumulated gradients: there is nothing to expect or take."""
        return len(self._in_place) == len(self._parameters)

    def stop(self) -> None:
        """Do not take gradients that arrive from now on: they stay in `.grad`, for the user."""
        self._active = False
        while self._in_place:
            self._in_place.popitem()[1].grad = None
        if not self._handles:
            for parameter in [each for each in (self._last, *self._stay) if each.requires_grad]:
                self._watch(parameter)

    def take(self, on_gradient: GradientCallback | None) -> None:
        """Move the gradients in `.grad` into the buckets, or pass them to `on_gradient`."""
        for bucket, parameters in self._by_bucket:
            gradients = [None if id(parameter) in self._in_place else parameter.grad for parameter in parameters]
            if on_gradient is None:
                bucket.deposit(gradients)
            else:
                for piece, gradient in zip(bucket.place.pieces, gradients, strict=True):
                    if gradient is not None:
                        on_gradient(piece.row, gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = None

    def take_rest(self, on_gradient: GradientCallback | None, *, reducing: bool) -> bool:
        """Take the gradients that a backward has left in incomplete units; return True if some have not arrived.

        Raises RuntimeError if a gradient arrived after the reduction of the unit began (`reducing`)."""
        if self._all_in_place:
            return False
        rest = [each for each in self._parameters if each.grad is not None and id(each) not in self._in_place]
        missing, self.complete = not (self.complete or self._in_place), False
        if rest and reducing and not missing:
            raise RuntimeError(
                f"{self._name(rest[0])} received a gradient, but the graph of the loss does not lead to it, and its "
                "reduction may have begun. An autograd function of the model calls backward() itself: let it return "
                "gradients instead"
            )
        if rest:
            self.take(on_gradient)
        return missing and len(rest) < len(self._expected)

    def close(self) -> None:
        """Remove the hooks, and the views of buckets."""
        self.stop()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.popitem()[1].remove()

    def _name(self, parameter: Tensor) -> str:
        return next(bucket.place.pieces[at].row.name for bucket, at, p in self.unit.trainable() if p is parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        """Register the hook on a parameter, or move it behind hooks that the user has registered later."""
        own = self._handles.get(id(parameter))
        hooks = parameter._post_accumulate_grad_hooks
        if own is None:
            self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(_weak(self._arrived))
        elif hooks and own.id in hooks and next(reversed(hooks)) != own.id:
            hooks[own.id] = hooks.pop(own.id)

    def _move(self, to: nn.Parameter) -> None:
        """Move the hook to another parameter; it also stays where the user has hooks."""
        staying = any(self._last is parameter for parameter in self._stay)
        if not staying and len(self._last._post_accumulate_grad_hooks or ()) == 1 and id(self._last) in self._handles:
            self._handles.pop(id(self._last)).remove()
        self._last = to
        self._watch(to)

    def _arrived(self, parameter: Tensor) -> None:
        if not self._active or self.complete:
            return
        if parameter.grad is None:
            raise ValueError(
                f"a hook on {self._name(parameter)} has set its .grad to None, as a hook that updates in the backward "
                "does. The plan accumulates and applies the gradients itself; let the hook leave .grad"
            )
        if self._in_place:
            return
        missing = [each for each in self._expected if each.grad is None]
        if not missing:
            self.complete = True
            self._on_complete(self)
            return
        waiting = [each for each in missing if each.requires_grad]  # others were frozen inside of an open step
        if parameter is self._last and waiting:
            self._move(waiting[0])
        if self._progress is not None:
            self._progress()


def _kind(row: ParameterRow, mesh: Mesh) -> tuple[Any, ...]:
    return str(row.dtype), not row.trainable, row.summed, row.copy_axes(mesh), row.held_at, row.counted_elsewhere


_VALUES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""Getters of tensor attributes that are views of the values; other getters read metadata such as shape and dtype."""


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that calls a method of an object without keeping the object alive.

    Python's collector does not see the hooks of a parameter, so a dropped trainer would keep its memory."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return hook


class ParameterGatherer:
    """Gathers and frees ZeRO-3 units by hooks on their modules, until `close()`. `peak`: most gathered bytes at once.

    Units with `overlaps` are awaited before the forwards of their modules."""

    def __init__(self, module: nn.Module, *, units: Sequence[LiveUnit], prefetch: int) -> None:
        """`prefetch`: how many units are gathered ahead of the one that runs."""
        self._units = [unit for unit in units if unit.is_sharded]
        self._prefetch = prefetch
        awaited = [unit for unit in units if unit.overlaps]
        self._owners = {id(p): unit for unit in (*self._units, *awaited) for group in unit.parameters for p in group}
        self._whole: dict[LiveUnit, None] = {}
        self._open: list[LiveUnit] = []
        self._asked: list[LiveUnit] = []  # they stay gathered until `free_all`, for a gradient that was asked for
        self._backward = False
        self._recorded = False
        self._passes: dict[bool, list[LiveUnit]] = {False: [], True: []}
        self._seen: list[LiveUnit] = []
        self.peak = 0
        self._hooks = contextlib.ExitStack()
        self.close = self._hooks.close
        modules = dict(module.named_modules(remove_duplicate=False))
        for unit in self._units:
            for name in unit.spec.modules:
                self._watch(modules[name], unit)
        for unit in awaited:
            for name in unit.spec.modules:
                self._hooks.callback(modules[name].register_forward_pre_hook(unit.ready, prepend=True).remove)
        if self._units:
            self._hooks.callback(module.register_forward_hook(self._after_model, always_call=True).remove)

    @property
    def gather_on_use(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a parameter that is used outside the modules of its unit is gathered at once."""
        return _Guard(self._owners, self._need_now) if self._owners else contextlib.nullcontext()

    def begin_forward(self, *, keep: bool = False) -> None:
        """End the previous pass, free every unit unless `keep`, and begin a forward."""
        self._finish_pass()
        self._backward = False
        if not keep:
            self.free_all()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Gather the units for the backward that runs inside the block; after it, free all units. An error from a use
        of freed parameters is raised again with its cause and remedy."""
        self._finish_pass()
        self._backward = True
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
        self.free_all()

    def free_all(self) -> None:
        """End the pass and free every unit."""
        self._finish_pass()
        self._recorded = False
        self._open = []
        for unit in self._units:
            unit.free()
        for unit in self._asked:
            unit.stays_gathered = False
        self._whole, self._asked = {}, []

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
            returned = list(all_tensors(output))
            for tensor in (each for each in returned if type(each) in (Tensor, nn.Parameter)):
                if owner := self._owners.get(id(tensor if tensor._base is None else tensor._base)):
                    owner.stays_gathered = True  # later modules may read this view of a parameter
            if torch.is_grad_enabled():
                self._recorded = True
                for tensor in returned:
                    # An input that the module returns unchanged gets no hook: its gradient is complete only after the
                    # backward of this module. `_version` tells if an input was changed.
                    given, version = was_there.get(id(tensor), (None, 0))
                    changed = given is None or given() is not tensor or version != tensor._version
                    if tensor.requires_grad and changed:
                        tensor.register_hook(lambda _gradient: self._need(unit, stays=not self._backward))

        self._hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        # always_call: activation checkpointing stops a repeated forward early by an exception.
        self._hooks.callback(module.register_forward_hook(after, always_call=True).remove)

    def _after_model(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.is_grad_enabled() and not self._recorded:
            self.free_all()

    def _need(self, unit: LiveUnit, *, stays: bool = False) -> None:
        # The graph of a gradient that a script or loss asks for (autograd.grad) needs the unit too, without a hook.
        if stays and not unit.stays_gathered:
            unit.stays_gathered = True
            self._asked.append(unit)
        again = bool(self._seen) and self._seen[-1] is unit
        if not again:
            self._seen.append(unit)
        coming = self._coming(self._prefetch)
        if not (again or unit.stays_gathered):  # again: a second module of the same unit, so prefetched units stay
            for other in [each for each in self._whole if each not in (unit, *coming, *self._open)]:
                if not other.stays_gathered:
                    other.free()
                    del self._whole[other]
        unit.ready()
        for follower in coming:
            follower.start_gather()
        self._whole |= dict.fromkeys((unit, *coming))
        for later in self._coming(self._prefetch + 1):
            later.fetch_shards()
        self.peak = max(self.peak, sum(bucket.gathered for u in self._whole for bucket in u.buckets))

    def _need_now(self, unit: LiveUnit) -> None:
        # No hook announces the backward of this use, so the unit stays gathered until the pass ends.
        self._recorded = self._recorded or torch.is_grad_enabled()
        if unit not in self._open:
            unit.stays_gathered = True
            unit.ready()
            self._whole[unit] = None

    def _coming(self, count: int) -> Sequence[LiveUnit]:
        """Return the next units by the order of the last pass, at most `count`; none if this pass differs from it."""
        here, last = len(self._seen) - 1, self._passes[self._backward]
        return last[here + 1 : here + 1 + count] if here < len(last) and last[here] is self._seen[here] else ()

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
        if torch.compiler.is_compiling():  # a function that compiles itself, such as FlexAttention's
            return func(*args, **(kwargs or {}))
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
