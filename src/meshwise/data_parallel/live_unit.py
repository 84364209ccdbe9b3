"""A unit on this rank: the buckets that are gathered, freed and reduced together, and the model's view of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import Work
from meshwise.data_parallel.bucket import Bucket, ShardGroup
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.parameter_table import ParameterRow, ParameterUnit

_SHARED = "the ranks of this host share one copy of it, so that each of them would write to it"


class LiveUnit:
    """Buckets of one unit, and the module's parameters that view them.

    While a ZeRO-3 unit is freed, each parameter is a NaN expanded to its shape, so that an unexpected use shows as NaN.

    | spec         the unit's rows of the parameter table
    | parameters   parameters of the module, per bucket in piece order
    | whole        True while the parameters have their values; always True without ZeRO-3
    | stays_gathered   True if the unit is freed only at the end of a pass, not when the next unit runs
    """

    def __init__(self, spec: ParameterUnit, *, shard_group: ShardGroup) -> None:
        self.spec = spec
        kind = partial(_kind, mesh=shard_group.world.mesh)
        alike = [list(group) for _, group in groupby(sorted(spec.rows, key=kind), key=kind)]
        self.buckets = [Bucket(rows, shard_group=replace(shard_group, axes=rows[0].summed)) for rows in alike]
        self.parameters: list[list[nn.Parameter]] = []
        self._versions: list[list[int]] = []
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

        place: puts a tensor into the module as the parameter of a row, and returns this parameter.
        """
        for bucket in self.buckets:
            world, elsewhere = bucket.shard_group.world, dict(bucket.place.pieces[0].row.held_at)
            holders = world.mesh.others(elsewhere)
            bucket.fill(
                source.broadcast_full(piece.row.name, world=world, axes=holders) for piece in bucket.place.pieces
            )
            values = self._between_uses(bucket)
            pieces = bucket.place.pieces
            # `.data` has a separate version counter, which writes to the buffer do not change.
            self.parameters.append([place(piece.row, value.data) for piece, value in zip(pieces, values, strict=True)])
            self._versions.append([parameter._version for parameter in self.parameters[-1]])
        self.whole = not self.is_sharded

    def change_message(self) -> str:
        """Return an error message with its remedy if a parameter was changed or written to since `load`, else ""."""
        for bucket, parameters, versions in zip(self.buckets, self.parameters, self._versions, strict=True):
            freed = bucket.is_sharded and not self.whole
            memory = bucket.whole.untyped_storage().data_ptr()
            for piece, parameter, version in zip(bucket.place.pieces, parameters, versions, strict=True):
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
        self._show([bucket.views() for bucket in self.buckets])

    def free(self) -> None:
        """Free the gathered parameters; the module's parameters then read as NaN. Does nothing without ZeRO-3."""
        if not self.is_sharded or not (self.whole or self._gathering):
            self.release_shards()
            return
        self.ready()
        self.whole = False
        self._show([self._between_uses(bucket) for bucket in self.buckets])
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


def _kind(row: ParameterRow, mesh: Mesh) -> tuple[Any, ...]:
    return str(row.dtype), not row.trainable, row.summed, row.copies(mesh), row.held_at, row.counted_elsewhere
