"""A unit on this rank: the buckets that are gathered, freed and reduced together, and the model's view of them.

`UnitGradients` takes the gradients of a unit from `.grad` all at once, with one hook per unit instead of one per
parameter.

Autograd leaves a new gradient in `.grad` without a copy. A hook on one parameter of the unit runs when its gradient
arrives. If other gradients of the unit are still missing, the hook moves to a parameter without one. So after the first
backward it is on the parameter whose gradient arrives last:

    | backward 1   on a: b and c are missing, move to b    on b: c is missing, move to c    on c: complete
    | backward 2                                                                            on c: complete

Hooks also stay on the first and the last parameter of the unit, where this rank makes progress in collectives. A
parameter with the user's own hook for accumulated gradients keeps a hook of the unit too. It notices when the user's
hook has removed the gradient."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import Work
from meshwise.data_parallel.bucket import Bucket, ShardGroup
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.parameter_table import ParameterRow, ParameterUnit

GradientCallback: TypeAlias = Callable[[ParameterRow, Tensor], None]
"""Callback `(row, gradient)` that receives each gradient of this rank before reduction, instead of the bucket."""

_SHARED = "the ranks of this host share one copy of it, so that each of them would write to it"


class LiveUnit:
    """Buckets of one unit, and the module's parameters that view them.

    While a ZeRO-3 unit is freed, each parameter is a NaN expanded to its shape, so that an unexpected use shows as NaN.

    | spec         the unit's rows of the parameter table
    | parameters   parameters of the module, per bucket in piece order
    | whole        True while the parameters have their values; always True without ZeRO-3
    | stays_gathered   True if the unit is freed only at the end of a pass, not when the next unit runs"""

    def __init__(self, spec: ParameterUnit, *, shard_group: ShardGroup) -> None:
        self.spec = spec
        kind = partial(_kind, mesh=shard_group.world.mesh)
        alike = [list(group) for _, group in groupby(sorted(spec.rows, key=kind), key=kind)]
        self.buckets = [Bucket(rows, shard_group=shard_group.of(rows[0].summed)) for rows in alike]
        self.parameters: list[list[nn.Parameter]] = []
        self._unused: list[list[Tensor]] = []
        self._used: list[list[Tensor]] | None = None
        self._state: list[list[tuple[Any, ...]]] = []
        self.whole = True
        self.stays_gathered = False
        self._gathering: list[Work] = []

    @property
    def rows(self) -> list[ParameterRow]:
        """Rows of the parameters, in the order of `parameters`: bucket by bucket."""
        return [piece.row for bucket in self.buckets for piece in bucket.place.pieces]

    @property
    def is_sharded(self) -> bool:
        """True if some parameters exist only as shards between uses (ZeRO-3)."""
        return any(bucket.is_sharded for bucket in self.buckets)

    def load(self, source: ParameterSource, *, place: Callable[[ParameterRow, Tensor], nn.Parameter]) -> None:
        """Fill the buckets with values from `source` (collectives), and make the module's parameters view them.

        place: puts a tensor into the module as the parameter of a row, and returns this parameter."""
        for bucket in self.buckets:
            world, elsewhere = bucket.shard_group.world, dict(bucket.place.pieces[0].row.held_at)
            holders = world.mesh.others(elsewhere)
            bucket.fill(
                source.broadcast_full(piece.row.name, world=world, axes=holders) for piece in bucket.place.pieces
            )
            values = self._between_uses(bucket)
            self._unused.append(values)
            pieces = bucket.place.pieces
            # `.data` has a separate version counter, which writes to the buffer do not change.
            self.parameters.append([place(piece.row, value.data) for piece, value in zip(pieces, values, strict=True)])
        self.whole = not self.is_sharded
        self._state = [
            [(one.requires_grad, one._version, one.data_ptr()) for one in parameters] for parameters in self.parameters
        ]

    def change_message(self) -> str:
        """Return an error message with its remedy if a parameter was changed or written to since `load`, else "".

        Call it between two steps, while ZeRO-3 units are freed."""
        for bucket, parameters, state in zip(self.buckets, self.parameters, self._state, strict=True):
            if state == [(one.requires_grad, one._version, one.data_ptr()) for one in parameters]:
                continue
            freed = bucket.is_sharded and not self.whole
            memory = bucket.whole.untyped_storage().data_ptr()
            for piece, parameter, (_, version, _) in zip(bucket.place.pieces, parameters, state, strict=True):
                name, held = piece.row.name, parameter.untyped_storage()
                if parameter.requires_grad != bucket.trainable:
                    return (
                        f"requires_grad of {name!r} was {bucket.trainable} when the model was parallelized and is "
                        f"{parameter.requires_grad} now; call parallelize again after freezing or unfreezing"
                    )
                if parameter.dtype != bucket.dtype:
                    return (
                        f"{name!r} was {bucket.dtype} when the model was parallelized and is {parameter.dtype} now; "
                        "convert the model before parallelize"
                    )
                if held.nbytes() != bucket.dtype.itemsize if freed else held.data_ptr() != memory:
                    return (
                        f"the tensor of {name!r} was replaced after the model was parallelized, so the model no longer "
                        "uses the tensor that is trained; set values and devices before parallelize"
                    )
                if (bucket.has_master or bucket.shared) and parameter._version != version:
                    why = "the next step would overwrite it from its float32 copy" if bucket.has_master else _SHARED
                    return (
                        f"{name!r} was written to after the model was parallelized, and {why}; set values before "
                        "parallelize, or load them with trainer.load"
                    )
        return ""

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

    def start_gather(self) -> None:
        """Start to gather the parameters; do nothing if they are gathered or being gathered."""
        if self.whole or self._gathering:
            return
        self._gathering = [bucket.gather() for bucket in self.buckets if bucket.is_sharded]

    def ready(self) -> None:
        """Wait until the parameters are gathered, and set them in the module; start the gather if needed."""
        if self.whole:
            return
        self.start_gather()
        for work in self._gathering:
            work.wait()
        self._gathering = []
        self.release_shards()
        self.whole = True
        if self._used is None:
            self._used = [bucket.views() for bucket in self.buckets]
        self._show(self._used)

    def free(self) -> None:
        """Free the gathered parameters; the module's parameters then read as NaN. Does nothing without ZeRO-3."""
        if not self.is_sharded or not (self.whole or self._gathering):
            self.release_shards()
            return
        self.ready()
        self.whole = False
        self._show(self._unused)
        for bucket in self.buckets:
            if bucket.is_sharded:
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
        """Return the module's tensors between uses: NaN for a ZeRO-3 bucket, views of the bucket otherwise."""
        if not bucket.is_sharded:
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
        self, unit: LiveUnit, *, on_complete: Callable[["UnitGradients"], None], progress: Callable[[], object]
    ) -> None:
        """`on_complete` is called when the last expected gradient has arrived; it calls `take`.

        `progress` is called at the hooks before."""
        self.unit = unit
        self.complete = False
        self._on_complete = on_complete
        self._progress = progress
        self._by_bucket: list[tuple[Bucket, list[nn.Parameter]]] = [
            (bucket, parameters)
            for bucket, parameters in zip(unit.buckets, unit.parameters, strict=True)
            if bucket.trainable
        ]
        self._parameters = [parameter for _, parameters in self._by_bucket for parameter in parameters]
        self._expected = self._parameters
        self._active = False
        self._handles: dict[int, RemovableHandle] = {}
        self._last = self._parameters[0]
        self._stay = (self._parameters[0], self._parameters[-1])
        for parameter in self._stay:
            self._watch(parameter)

    def begin_step(self) -> None:
        """Discard earlier gradients, and put the hooks behind those that the user has registered since."""
        self.stop()
        for parameter in self._parameters:
            parameter.grad = None
        for parameter in [each for each in self._parameters if each._post_accumulate_grad_hooks]:
            self._watch(parameter)

    def expect(self, leaves: set[int] | None) -> bool:
        """Expect gradients of all parameters, or of those with an id in `leaves`; return True if fewer than all."""
        self._expected = (
            self._parameters if leaves is None else [each for each in self._parameters if id(each) in leaves]
        )
        self.complete, self._active = not self._expected, True
        if leaves is not None and self._expected and id(self._last) not in leaves:
            self._move(self._expected[0])
        return len(self._expected) < len(self._parameters)

    def stop(self) -> None:
        """Leave gradients that arrive from now on to the user."""
        self._active = False

    def take(self, on_gradient: GradientCallback | None) -> None:
        """Move all gradients that are there into the buckets, or pass them to `on_gradient`."""
        for bucket, parameters in self._by_bucket:
            gradients = [parameter.grad for parameter in parameters]
            if on_gradient is None:
                bucket.deposit(gradients)
            else:
                for piece, gradient in zip(bucket.place.pieces, gradients, strict=True):
                    if gradient is not None:
                        on_gradient(piece.row, gradient)
            for parameter in parameters:
                parameter.grad = None

    def take_rest(self, on_gradient: GradientCallback | None, *, reducing: bool) -> bool:
        """Take the gradients that a backward has left in incomplete units; return True if some have not arrived.

        Raises RuntimeError if a gradient arrived after the reduction of the unit began (`reducing`)."""
        rest = [parameter for parameter in self._parameters if parameter.grad is not None]
        missing, self.complete = not self.complete, False
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
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()

    def _name(self, parameter: Tensor) -> str:
        return next(bucket.place.pieces[at].row.name for bucket, at, p in self.unit.trainable() if p is parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        """Register the hook on a parameter, or move it behind hooks that the user has registered later."""
        own = self._handles.get(id(parameter))
        hooks = parameter._post_accumulate_grad_hooks
        if own is None:
            self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._arrived)
        elif hooks and own.id in hooks and next(reversed(hooks)) != own.id:
            hooks[own.id] = hooks.pop(own.id)

    def _move(self, to: nn.Parameter) -> None:
        """Move the hook to another parameter; it also stays where the user has hooks."""
        staying = any(self._last is parameter for parameter in self._stay)
        if not staying and len(self._last._post_accumulate_grad_hooks or ()) == 1:
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
        missing = [each for each in self._expected if each.grad is None]
        if not missing:
            self.complete = True
            self._on_complete(self)
            return
        if parameter is self._last:
            self._move(missing[0])
        self._progress()


def _kind(row: ParameterRow, mesh: Mesh) -> tuple[Any, ...]:
    return str(row.dtype), not row.trainable, row.summed, row.copies(mesh), row.held_at, row.counted_elsewhere
