"""Data parallel training of one model with ZeRO 0 to 3: run backwards, reduce gradients, publish parameters.

The row of a parameter names its layout and the axes over which its gradients are summed. So the same buckets also
train a model that tensor parallelism has split.

docs/synchronisation.md has the bytes of a step's collectives, also with codecs and replicas of groups (`dp=4x8`).

Units are reduced in one fixed order: the reverse of the parameter table. A reduction starts when the gradients of its
unit and of all units before it are complete on this rank, or at the end of the backward. So the collectives match even
on ranks that took other branches of the model or had no data."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket, StorageConfig
from meshwise.data_parallel.live_unit import GradientCallback, LiveUnit, ParameterGatherer, UnitGradients
from meshwise.memory.swap_file import TierError
from meshwise.model.deferred_init import ParameterSource, install
from meshwise.model.parameter_table import ParameterRow, ParameterTable
from meshwise.model.torch_private import graph_nodes


class DataParallel:
    """Runs backwards of one module, reduces the gradients over `world`, and publishes the updated parameters.

    It is not an `nn.Module`: callers run `module` themselves and pass the loss to `backward`."""

    def __init__(
        self,
        source: ParameterSource,
        *,
        table: ParameterTable,
        world: World,
        storage: StorageConfig,
        by_module: bool = True,
    ) -> None:
        """`by_module`: hooks gather each ZeRO-3 unit when its module runs; if False, the caller calls `gather`."""
        self.module: nn.Module = source.module
        self.table = table
        self.world = world
        self.storage = storage
        self.reduction = storage.reduction
        self.tiers = storage.tiers
        here = table.on(world.mesh, rank=world.rank)
        self.units = [LiveUnit(unit, world=world, storage=storage) for unit in here.units]
        new = lambda row, value: install(self.module, row=row, tensor=value)  # noqa: E731
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets if bucket.trainable]
        """The buckets with trainable parameters, in table order."""
        for unit in self.units:
            unit.load(source, place=new if source.deferred else self._replace)
        self.gatherer = ParameterGatherer(self.module, units=self.units if by_module else (), prefetch=storage.prefetch)
        trained = [unit for unit in reversed(self.units) if any(True for _ in unit.trainable())]
        # Under pp nothing is reduced during a backward, so its hooks need make no progress.
        progress = world.progress if by_module and world.size > 1 else None
        self._order = [UnitGradients(unit, on_complete=self._arrived, progress=progress) for unit in trained]
        self._started = 0
        self._in_flight: list[LiveUnit] = []
        self._last = True
        self._reducing = False
        self._on_gradient: GradientCallback | None = None
        self._incomplete = True  # some gradients did not arrive in the last backward, or it is not known

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Discard all earlier gradients, and wait for transfers and reductions that are still running."""
        self._in_flight.clear()
        with contextlib.suppress(TierError):
            self.tiers.settle()
        for gradients in self._order:
            gradients.begin_step()
        for bucket in self.buckets:
            bucket.begin_step()

    def backward(self, loss: Tensor | None, *, last: bool, keep: bool = True) -> None:
        """Run the backward of one micro-batch, and reduce the gradients: ZeRO-2 and 3 always, ZeRO-0 and 1 if `last`.

        Returns when the reductions have ended; all ZeRO-3 units are freed then.

        loss: None if this rank has no rows in the micro-batch; it then only takes part in the reductions.
        last: no micro-batch follows in this step.
        keep: False discards the gradients; the backward then only runs for its collectives."""
        reduces = last or self.reduction.shards_gradients
        self._started, self._last = 0, last
        if loss is not None and loss.requires_grad:
            leaves = leaf_ids(loss) if self._incomplete else None
            absent = self._expect(leaves, in_place=keep and not (reduces or self._incomplete))
            reentrant = self._incomplete and leaves is None
            self._reducing = reduces and not reentrant
            self._on_gradient = None if keep else discard_gradient
            with self.gatherer.backward():
                loss.backward()
            self._incomplete = self.collect() or absent or reentrant
            self._stop()
        else:
            self.gatherer.free_all()
        if reduces:
            self._start(all_of_them=True)
            self.settle()
        self._reducing = False

    def accumulate(self, on_gradient: GradientCallback | None = None) -> None:
        """Accumulate the gradients of a backward that the caller runs next; or pass them to `on_gradient`."""
        self._on_gradient = on_gradient
        self._reducing = False
        self._expect(None, in_place=on_gradient is None)

    def collect(self) -> bool:
        """Take the gradients that a backward has left in `.grad`; return True if some have not arrived."""
        missing = [one.take_rest(self._on_gradient, reducing=self._reducing) for one in self._order]
        return any(missing)

    def accumulated(self, name: str) -> Tensor:
        """Return this rank's unreduced gradient of a parameter as a writable view; zeros if it has none."""
        return next(
            bucket.accumulated(index)
            for unit in self.units
            for bucket, index, _ in unit.trainable()
            if bucket.place.pieces[index].row.name == name
        )

    def gather(self) -> None:
        """Start to gather all units; `LiveUnit.ready` waits for one of them."""
        for unit in self.units:
            unit.start_gather()
        gathered = sum(bucket.gathered for unit in self.units for bucket in unit.buckets)
        self.gatherer.peak = max(self.gatherer.peak, gathered)

    def reduce(self) -> None:
        """Start to reduce the accumulated gradients of all units; `settle` waits for the end."""
        self._stop()
        self._started, self._last = 0, True
        self._start(all_of_them=True)

    def reduce_replicas(self) -> None:
        """Sum over the replicas of the shards, if no backward of the step was the last one (`zero` 2 and 3)."""
        for bucket in self.buckets:
            bucket.start_replicas()
        self._settle_replicas()

    def settle(self) -> None:
        """Wait for all reductions that have started, and stop accumulating gradients."""
        self._stop()
        self._settle()
        self._settle_replicas()

    def inspect(self, loss: Tensor, *, on_gradient: GradientCallback) -> None:
        """Run the backward of `loss`, and pass every gradient of this rank to `on_gradient`; keep and reduce none."""
        self.accumulate(on_gradient)
        with self.gatherer.backward():
            loss.backward()
        self.collect()
        self._stop()

    def squared_norm(self) -> Tensor:
        """Return this rank's part of the squared norm of the reduced gradient, an fp64 scalar; the parts are summed."""
        counted = [each for bucket in self.buckets if (each := bucket.gradient_for_norm()) is not None]
        if len(counted) == len(self.buckets) and len({(each.dtype, each.device) for each in counted}) == 1:
            squares = torch.stack(torch._foreach_norm(counted)).double().square()
        else:
            none = torch.zeros((), dtype=torch.float64, device=self.world.device)
            squares = torch.stack([none, *(bucket.squared_norm() for bucket in self.buckets)])
        self.tiers.settle()
        return squares.cumsum(0)[-1].clone()  # cumsum adds in order; the clone lets the rest be freed

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients that this rank owns by `factor`; those on disk are multiplied when read."""
        here = [gradient for bucket in self.buckets for gradient in bucket.gradients_to_scale(factor)]
        if here and factor != 1.0:
            torch._foreach_mul_(here, factor)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.gatherer.close()
        for gradients in self._order:
            gradients.close()

    def _replace(self, row: ParameterRow, value: Tensor) -> nn.Parameter:
        parameter = self.module.get_parameter(row.name)
        parameter.data = value
        return parameter

    # ---- gradient hooks and reductions -------------------------------------------------------------------------

    def _arrived(self, gradients: UnitGradients) -> None:
        """Take the gradients of a complete unit, and start to reduce it if its turn has come."""
        gradients.take(self._on_gradient)
        if self._reducing:
            self._start(all_of_them=False)
        self.world.progress()  # other ranks may wait for this rank's part of the last reduction

    def _expect(self, leaves: set[int] | None, *, in_place: bool) -> bool:
        """Expect gradients of all trainable parameters, or of those with an id in `leaves`; return True if fewer."""
        fewer = [gradients.expect(leaves, in_place=in_place) for gradients in self._order]
        return any(fewer)

    def _stop(self) -> None:
        for gradients in self._order:
            gradients.stop()

    def _start(self, *, all_of_them: bool) -> None:
        """Start to reduce the next units in order, up to the first unit with missing gradients.

        all_of_them: start all remaining units; missing gradients count as zero."""
        while self._started < len(self._order):
            gradients = self._order[self._started]
            if not all_of_them and not gradients.complete:
                return
            # One unit is reduced while the next one accumulates.
            if self.reduction.shards_gradients or self.storage.outer:
                self._settle()
            self._started += 1
            self._in_flight.append(gradients.unit)
            for bucket in gradients.unit.buckets:
                if bucket.trainable:
                    bucket.start_reduce()

    def _settle(self) -> None:
        while self._in_flight:
            for bucket in self._in_flight.pop(0).buckets:
                bucket.settle()
                if self._last and bucket.trainable and bucket.has_replicas:
                    bucket.start_replicas()

    def _settle_replicas(self) -> None:
        for bucket in (bucket for gradients in self._order for bucket in gradients.unit.buckets):
            bucket.settle_replicas()

    # ---- full tensors ------------------------------------------------------------------------------------------

    def own_parameters(self) -> Iterator[Tensor]:
        """Yield the full tensors of the parameters whose parts this rank holds, in table order (collectives)."""
        for unit in self.units:
            unit.start_gather(exact=True)
            unit.ready()
            values = {
                row.name: parameter.detach()
                for row, parameter in zip(unit.rows, itertools.chain(*unit.parameters), strict=True)
            }
            # `free` takes the memory of views: reading one that a caller kept would end the process.
            copies = any(bucket.gathered for bucket in unit.buckets)
            for row in unit.spec.rows:
                full = self._full_tensor(row, values[row.name])
                yield full.clone() if copies and full is values[row.name] else full
            unit.free()

    def full_tensors(self, owned: Callable[[Bucket], Tensor]) -> Iterator[tuple[ParameterRow, Tensor]]:
        """Yield (row, full tensor) of each trainable parameter of this rank, in table order (collectives).

        `owned` returns values of the elements of a bucket that this rank updates, (elements,), as gradients."""
        for unit in self.units:
            values: dict[str, Tensor] = {}
            for bucket in unit.buckets:
                if bucket.trainable:
                    names = [piece.row.name for piece in bucket.place.pieces]
                    whole = bucket.gathered_from(owned(bucket))
                    values.update(zip(names, bucket.views(whole), strict=True))
            for row in unit.spec.rows:
                if row.trainable:
                    yield row, self._full_tensor(row, values[row.name])

    def _full_tensor(self, row: ParameterRow, part: Tensor) -> Tensor:
        """Return the full tensor of a parameter; `part` is this rank's part by its layout (a collective)."""
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


def discard_gradient(_row: ParameterRow, _gradient: Tensor) -> None:
    """Do nothing: a `GradientCallback` that discards the gradient."""


def leaf_ids(loss: Tensor, *, until: Callable[[Node], bool] = lambda _: False) -> set[int] | None:
    """Return the ids of the leaf tensors whose gradient `loss.backward()` accumulates, without those behind `until`.

    Returns None if the graph contains a reentrant checkpoint. Such a checkpoint runs further backwards inside this one,
    so the graph does not show its parameters, and a parameter may receive several gradients."""
    nodes = list(graph_nodes([loss.grad_fn], until=until))
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        return None
    return {id(variable) for node in nodes if isinstance(variable := getattr(node, "variable", None), Tensor)}
