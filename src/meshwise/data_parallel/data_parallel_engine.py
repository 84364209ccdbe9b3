"""Data parallel training of one model: gradients summed over the ranks that share its parameters, ZeRO stages 0 to 3.

The row of a parameter says what a rank stores of it, and over which axes its gradients are parts of a sum. So the same
buckets train a model that tensor parallelism has split.

Collectives of one step over N > 1 ranks, with m micro-batches and P bytes of trainable parameters (padded to N equal
shards a bucket; F bytes more when some are frozen). One all-reduce of four fp64 numbers (loss, count, norm, digest) is
not listed:

    | zero=0    all-reduce P
    | zero=1    reduce-scatter P, all-gather P
    | zero=2    m reduce-scatters of P, all-gather P
    | zero=3    m reduce-scatters of P; m all-gathers of P + F forward, and m of P + F less the last unit backward
    |           (a unit that a tied weight brings back in a pass is gathered again there)

Ranks of one host that hold the parameters together gather none under zero=3, and publish them once, as under zero=2;
neither moves anything. A forward that is repeated in the backward (recomputation) adds none: its unit is whole for the
backward already. P is in the parameters' dtype for gathers, and in the wire dtype for reductions.

Reductions start in one fixed order, the reverse of the parameter table, as soon as the units before are complete on
this rank. The end of the last backward starts the remaining ones. The order never depends on which hooks fired, so
ranks that took other branches of the model, or had no data, still agree.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket, ShardGroup, StorageConfig
from meshwise.data_parallel.bucket_place import Options
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.data_parallel.parameter_gather import ParameterGatherer
from meshwise.memory.swap_file import TierError
from meshwise.model.deferred_init import ParameterSource, install
from meshwise.model.parameter_table import ParameterRow, ParameterTable

IN_FLIGHT = 1
"""Reductions under way before the next one waits, where a gradient buffer lives only until it is reduced (ZeRO-2, 3):
one unit is being reduced while the next accumulates."""

Arrival = Callable[[ParameterRow, Tensor], None]


class DataParallel:
    """A module whose parameters are stored over `world` as the rows of `table` say."""

    def __init__(
        self,
        source: ParameterSource,
        *,
        table: ParameterTable,
        world: World,
        storage: StorageConfig,
        by_module: bool = True,
    ) -> None:
        """`by_module`: units are gathered when their modules run; otherwise the caller gathers them."""
        self.module: nn.Module = source.module
        self.table = table
        self.world = world
        self.storage = storage
        self.reduction = storage.reduction
        self.tiers = storage.tiers
        shard_group = ShardGroup(world, storage.replicas, storage)
        here = table.on(world.mesh, rank=world.rank)
        self.units = [LiveUnit(unit, shard_group=shard_group) for unit in here.units]
        for unit in self.units:
            unit.load(source, place=self._install if source.deferred else self._replace)
        self.gatherer = ParameterGatherer(self.module, units=self.units if by_module else ())
        self._order = [unit for unit in reversed(self.units) if any(True for _ in unit.trainable())]
        self._handles: list[RemovableHandle] = []
        self._watching: dict[int, RemovableHandle] = {}
        self._waiting: dict[int, set[int]] = {}
        self._started = 0
        self._in_flight: list[LiveUnit] = []
        self._reducing = False
        self._arrival: Arrival | None = None
        self._incomplete = True
        for unit in self._order:
            for bucket, index, parameter in unit.trainable():
                self._watch(unit, bucket, index, parameter)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that have gradients, in table order."""
        return [bucket for unit in self.units for bucket in unit.buckets if bucket.trainable]

    @property
    def _awaited(self) -> bool:
        """True if an arrival callback receives each reduced gradient."""
        return any(bucket.on_reduced is not None for bucket in self.buckets)

    @property
    def modules(self) -> list[nn.Module]:
        """The module."""
        return [self.module]

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """Return the slices that an optimizer updates on this rank, by options, in the same order on every rank."""
        groups: dict[Options, list[nn.Parameter]] = {row.options: [] for row in self.table.rows if row.trainable}
        for bucket in self.buckets:
            for options, parameter in bucket.slices:
                groups[options].append(parameter)
        return groups

    def check_parameters(self) -> None:
        """Raise ValueError when a parameter of the model is not what it was when the plan was applied."""
        for unit in self.units:
            if what := unit.altered():
                raise ValueError(what)

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the last step, of a step that raised, and of backwards outside of a step."""
        self._in_flight.clear()
        self._waiting = {}
        with contextlib.suppress(TierError):
            self.tiers.settle()
        for unit in self._order:
            for _, _, parameter in unit.trainable():
                parameter.grad = None
                _put_last(self._watching[id(parameter)], on=parameter)
        for bucket in self.buckets:
            bucket.begin_step()

    def backward(self, loss: Tensor | None, *, last: bool, keep: bool = True) -> None:
        """Run one micro-batch's backward (None: this rank has none) and reduce what its stage reduces then.

        `last`: no micro-batch follows in this step. `keep=False` runs the backward for its collectives only and
        throws the gradients away.
        """
        reduces = last or self.reduction.each_microbatch
        self._started = 0
        if loss is not None and loss.requires_grad:
            leaves = reached(loss) if self._incomplete else None
            absent = self._expect(leaves)
            hidden = self._incomplete and leaves is None
            self._reducing = reduces and not hidden
            self._arrival = None if keep else throw_away
            self.gatherer.begin(backward=True)
            with self.gatherer.explained():
                loss.backward()
            self.gatherer.rest()
            self._incomplete = absent or hidden or any(self._waiting.values())
        else:
            self.gatherer.rest()
        self._waiting = {}
        if reduces:
            self._start(all_of_them=True)
            self._settle(0)
        self._reducing = False

    def accumulate(self, arrival: Arrival | None = None) -> None:
        """Accumulate the gradients of all backwards from now on until `reduce`, or only show them."""
        self._arrival = arrival
        self._reducing = False
        self._expect(None)

    def accumulated(self, name: str) -> Tensor:
        """Return the gradient of a parameter that this rank has accumulated: part of a sum, writable."""
        return next(
            bucket.accumulated(index)
            for unit in self._order
            for bucket, index, _ in unit.trainable()
            if bucket.place.pieces[index].row.name == name
        )

    def gather(self) -> None:
        """Start to make all parameters whole."""
        for unit in self.units:
            unit.start_gather()
        gathered = sum(bucket.gathered for unit in self.units for bucket in unit.buckets)
        self.gatherer.peak = max(self.gatherer.peak, gathered)

    def reduce(self) -> None:
        """Start to reduce what has been accumulated; `settle` ends it."""
        self._waiting = {}
        self._started = 0
        self._start(all_of_them=True)

    def settle(self) -> None:
        """Wait for the reductions under way."""
        self._waiting = {}
        self._settle(0)

    def inspect(self, loss: Tensor, *, arrival: Arrival) -> None:
        """Run a backward that shows every gradient of this rank to `arrival` and keeps none."""
        self._arrival = arrival
        self._reducing = False
        self._expect(None)
        self.gatherer.begin(backward=True)
        with self.gatherer.explained():
            loss.backward()
        self.gatherer.rest()
        self._waiting = {}

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the summed gradient, fp64; shards and ties count once."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for bucket in self.buckets:
            total += bucket.square()
        self.tiers.settle()
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiply the owned gradients by a factor; gradients on disk are multiplied when they are read."""
        here = [gradient for bucket in self.buckets for gradient in bucket.scaled(factor)]
        if here and factor != 1.0:
            torch._foreach_mul_(here, factor)

    def publish(self) -> None:
        """Round this rank's masters to parameters, and send these to the ranks that use them."""
        for bucket in self.buckets:
            bucket.round_off()
        held = [bucket for unit in self.units for bucket in unit.buckets if bucket.trainable or bucket.shared]
        for work in [bucket.publish() for bucket in held]:
            work.wait()

    def memory(self) -> dict[str, int]:
        """Return the bytes of parameters and gradients on this rank, and the peak bytes of gathered parameters."""
        held = [each for unit in self.units for bucket in unit.buckets for each in bucket.tensors()]
        return {"parameters": 0, "gradients": 0, **self.tiers.bytes(held), "gathered_peak": self.gatherer.peak}

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.gatherer.close()
        for handle in self._handles:
            handle.remove()

    def _install(self, row: ParameterRow, value: Tensor) -> nn.Parameter:
        return install(self.module, row=row, tensor=value)

    def _replace(self, row: ParameterRow, value: Tensor) -> nn.Parameter:
        parameter = self.module.get_parameter(row.name)
        parameter.data = value
        return parameter

    # ---- arrivals and reductions -------------------------------------------------------------------------------

    def _watch(self, unit: LiveUnit, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        row = bucket.place.pieces[index].row

        def arrived(parameter: Tensor) -> None:
            waiting = self._waiting.get(id(unit))
            if waiting is None:
                return
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                raise ValueError(
                    f"a hook on {row.name} has taken its gradient away, as an update in the backward does. The plan "
                    "accumulates gradients and updates with them itself; let the hook leave .grad"
                )
            if self._reducing and id(parameter) not in waiting:
                raise RuntimeError(
                    f"{row.name} received a gradient, but the graph of the loss does not lead to it, and its reduction "
                    "may have begun. An autograd function of the model runs a backward of its own: let it return "
                    "gradients instead"
                )
            if self._arrival is None:
                bucket.deposit(index, gradient=gradient)
            else:
                self._arrival(row, gradient)
            waiting.discard(id(parameter))
            if self._reducing and not waiting:
                self._start(all_of_them=False)
            self.world.progress()  # the others wait for this rank's part of the last reduction before their next

        handle = parameter.register_post_accumulate_grad_hook(arrived)
        self._handles.append(handle)
        self._watching[id(parameter)] = handle

    def _expect(self, leaves: set[int] | None) -> bool:
        """Expect a gradient of every parameter, or of those among `leaves`; return True if some are left out."""
        absent = False
        for unit in self._order:
            expected = {id(parameter) for _, _, parameter in unit.trainable()}
            self._waiting[id(unit)] = expected if leaves is None else expected & leaves
            absent = absent or len(self._waiting[id(unit)]) < len(expected)
        return absent

    def _start(self, *, all_of_them: bool) -> None:
        """Start the reductions of units, in order, whose gradients are complete; of all units with `all_of_them`."""
        while self._started < len(self._order):
            unit = self._order[self._started]
            if not all_of_them and self._waiting[id(unit)]:
                return
            if self.reduction.each_microbatch or self._awaited:
                self._settle(IN_FLIGHT - 1)
            self._started += 1
            self._in_flight.append(unit)
            for bucket in unit.buckets:
                if bucket.trainable:
                    bucket.start_reduce()

    def _settle(self, left: int) -> None:
        while len(self._in_flight) > left:
            for bucket in self._in_flight.pop(0).buckets:
                bucket.settle()

    # ---- the whole of things -----------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) in table order, on every rank; the tensor is valid until the next one is asked for."""
        return from_holders(self.table.rows, own=self.own_parameters(), world=self.world, dtype=lambda row: row.dtype)

    def own_parameters(self) -> Iterator[Tensor]:
        """Yield the full parameters that this rank holds or has a part of, in table order."""
        for unit in self.units:
            unit.ready()
            values = {
                row.name: parameter.detach()
                for row, parameter in zip(unit.rows, itertools.chain(*unit.parameters), strict=True)
            }
            for row in unit.spec.rows:
                yield self._together(row, values[row.name])
            unit.free()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full reduced gradient) of the trainable parameters in table order, on every rank."""
        master = self.storage.precision.master_of
        rows = [row for row in self.table.rows if row.trainable]
        return from_holders(rows, own=self.own_gradients(), world=self.world, dtype=lambda row: master(row.dtype))

    def own_gradients(self) -> Iterator[Tensor]:
        """Yield the full reduced gradients of the trainable parameters that this rank holds, in table order."""
        for _, gradient in self.whole(lambda bucket: bucket.owned_gradient()):
            yield gradient

    def whole(self, owned: Callable[[Bucket], Tensor]) -> Iterator[tuple[ParameterRow, Tensor]]:
        """Yield a value of each trainable parameter on this rank as a full tensor, in table order (collectives).

        owned: the values of the elements that this rank updates of a bucket, (elements,). One unit is whole at a time.
        """
        for unit in self.units:
            values: dict[str, Tensor] = {}
            for bucket in unit.buckets:
                if bucket.trainable:
                    whole = bucket.gathered_from(owned(bucket))
                    for piece in bucket.place.pieces:
                        values[piece.row.name] = whole[piece.start : piece.stop].view(piece.shape)
            for row in unit.spec.rows:
                if row.trainable:
                    yield row, self._together(row, values[row.name])

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of the buffers, on every rank."""
        return self.module.named_buffers()

    def saves(self, buffer: str) -> bool:  # noqa: ARG002 - every rank has all of them
        """Return whether this rank is the one that saves a buffer."""
        return self.world.rank == 0

    def _together(self, row: ParameterRow, part: Tensor) -> Tensor:
        """Return the full tensor from the parts of the ranks along its layout's axes (a collective)."""
        mesh, group = self.world.mesh, self.world.group(row.layout.axes)
        if group.size == 1:
            return part
        shapes = [row.layout.local_shape(row.shape, mesh=mesh, rank=rank) for rank in group.ranks]
        parts = [part.new_empty(shape) for shape in shapes]
        self.world.all_gather(part.contiguous(), into=parts, axes=group.axes).wait()
        full = part.new_empty(row.shape)
        for rank, values in zip(group.ranks, parts, strict=True):
            row.put(values, into=full, mesh=mesh, rank=rank)
        return full


def from_holders(
    rows: Iterable[ParameterRow], *, own: Iterator[Tensor], world: World, dtype: Callable[[ParameterRow], torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of each row on every rank, sent by those that hold it; every rank calls it.

    own: the full tensors of the rows that this rank holds, in the order of the rows. dtype: of a row's tensor. Leaves
    out rows that are counted elsewhere.
    """
    for row in rows:
        holds = row.is_on(world.mesh, rank=world.rank)
        value = next(own) if holds else None
        if row.counted_elsewhere:
            continue
        if row.held_at:
            group = world.group(tuple(axis for axis, _ in row.held_at))
            source = next(n for n, rank in enumerate(group.ranks) if row.is_on(world.mesh, rank=rank))
            if value is None:
                value = torch.empty(row.shape, dtype=dtype(row), device=world.device)
            value = value.contiguous()
            world.broadcast(value, axes=group.axes, source=source).wait()
        assert value is not None
        yield row.name, value
    for _ in own:
        raise AssertionError("a rank holds more parameters than the table says")


def throw_away(_row: ParameterRow, _gradient: Tensor) -> None:
    """Discard a gradient: an arrival that keeps nothing."""


def reached(loss: Tensor) -> set[int] | None:
    """Return the ids of the leaf tensors whose gradient `loss.backward()` accumulates.

    Returns None when the graph does not show them. A reentrant checkpoint runs its own backwards inside this one: its
    parameters arrive unannounced, and those with further uses arrive more than once.
    """
    leaves: set[int] = set()
    seen = set()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointFunctionBackward":
            return None
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.add(id(variable))
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return leaves


def _put_last(handle: RemovableHandle, *, on: nn.Parameter) -> None:
    """Move our hook behind hooks registered since, so that those see the gradient before this one takes it."""
    hooks = on._post_accumulate_grad_hooks
    if hooks and next(reversed(hooks)) != handle.id and handle.id in hooks:
        hooks[handle.id] = hooks.pop(handle.id)
