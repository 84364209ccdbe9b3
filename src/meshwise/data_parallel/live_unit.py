"""A unit at work: the buckets that are gathered, freed and reduced together."""

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

_SHARED = "the ranks of this host hold one copy of it together, so that each of them would write to it"


class LiveUnit:
    """Unit of the parameter table on this rank.

    While a ZeRO-3 unit is not in use, the model's parameters hold NaN in the right shape, so an unexpected use cannot
    pass for a result.
    """

    def __init__(self, spec: ParameterUnit, *, shard_group: ShardGroup) -> None:
        self.spec = spec
        kind = partial(_kind, mesh=shard_group.world.mesh)
        alike = [list(group) for _, group in groupby(sorted(spec.rows, key=kind), key=kind)]
        self.buckets = [Bucket(rows, shard_group=replace(shard_group, axes=rows[0].summed)) for rows in alike]
        self.parameters: list[list[nn.Parameter]] = []
        self._versions: list[list[int]] = []
        self.whole = True
        self.encloses = False
        self._gathering: list[Work] = []

    @property
    def rows(self) -> list[ParameterRow]:
        """Its parameters in the order of `parameters`: bucket by bucket."""
        return [piece.row for bucket in self.buckets for piece in bucket.place.pieces]

    @property
    def at_rest(self) -> bool:
        """True if parameters exist as shards between uses."""
        return any(bucket.at_rest for bucket in self.buckets)

    def load(self, source: ParameterSource, *, place: Callable[[ParameterRow, Tensor], nn.Parameter]) -> None:
        """Fill the buckets from the source, and put this rank's parameters into the model with `place`."""
        for bucket in self.buckets:
            world, elsewhere = bucket.shard_group.world, dict(bucket.place.pieces[0].row.held_at)
            holders = tuple(axis for axis in world.mesh.names if axis not in elsewhere)
            bucket.fill(source.agreed(piece.row.name, world=world, axes=holders) for piece in bucket.place.pieces)
            values = self._at_rest(bucket)
            pieces = bucket.place.pieces
            # As `data`, a parameter has a version of its own, which our writes to the buffer do not change.
            self.parameters.append([place(piece.row, value.data) for piece, value in zip(pieces, values, strict=True)])
            self._versions.append([parameter._version for parameter in self.parameters[-1]])
        self.whole = not self.at_rest

    def altered(self) -> str:
        """Return a message if a parameter was replaced since it was put into the model, and what to do instead."""
        for bucket, parameters, versions in zip(self.buckets, self.parameters, self._versions, strict=True):
            resting = bucket.at_rest and not self.whole
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
                if held.nbytes() != bucket.dtype.itemsize if resting else held.data_ptr() != memory:
                    return (
                        f"the tensor of {name!r} was replaced after the model was parallelized, so what is trained is "
                        "no longer what the model uses; set values and devices before parallelize"
                    )
                if (bucket.has_master or bucket.shared) and parameter._version != version:
                    why = "the next step would overwrite it from its float32 copy" if bucket.has_master else _SHARED
                    return (
                        f"{name!r} was written to after the model was parallelized, and {why}; set values before "
                        "parallelize, or load them with trainer.load"
                    )
        return ""

    def fetch(self) -> None:
        """Start to copy the shards from their tiers, before a gather."""
        if not (self.whole or self._gathering):
            for bucket in self.buckets:
                if bucket.at_rest:
                    bucket.fetch()

    def let_go(self) -> None:
        """Release the gathered parameters of all buckets."""
        for bucket in self.buckets:
            bucket.let_go()

    def start_gather(self) -> None:
        """Start to make the parameters whole; does nothing when they are, or are about to be."""
        if self.whole or self._gathering:
            return
        self._gathering = [bucket.gather() for bucket in self.buckets if bucket.at_rest]

    def ready(self) -> None:
        """Return when the parameters are whole and the model sees them."""
        if self.whole:
            return
        self.start_gather()
        for work in self._gathering:
            work.wait()
        self._gathering = []
        self.let_go()
        self.whole = True
        self._show([bucket.views() for bucket in self.buckets])

    def free(self) -> None:
        """Free the gathered parameters; the model then sees NaN in their shapes."""
        if not self.at_rest or not (self.whole or self._gathering):
            self.let_go()
            return
        self.ready()
        self.whole = False
        self._show([self._at_rest(bucket) for bucket in self.buckets])
        for bucket in self.buckets:
            if bucket.at_rest:
                bucket.free()

    def trainable(self) -> Iterator[tuple[Bucket, int, nn.Parameter]]:
        """(bucket, index in the bucket, parameter) for every parameter that has a gradient."""
        for bucket, parameters in zip(self.buckets, self.parameters, strict=True):
            if bucket.trainable:
                for index, parameter in enumerate(parameters):
                    yield bucket, index, parameter

    def _show(self, values: list[list[Tensor]]) -> None:
        for parameters, tensors in zip(self.parameters, values, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor

    @staticmethod
    def _at_rest(bucket: Bucket) -> list[Tensor]:
        """Return the tensors that the model sees between uses; an unshared bucket stays as it is."""
        if not bucket.at_rest:
            return bucket.views()
        value = float("nan") if bucket.dtype.is_floating_point or bucket.dtype.is_complex else 0
        with torch.inference_mode(mode=False):  # a parameter of meta cannot be what is made there
            nothing = torch.full((), value, dtype=bucket.dtype, device=bucket.device)
        return [nothing.expand(piece.shape) for piece in bucket.place.pieces]


def _kind(row: ParameterRow, mesh: Mesh) -> tuple[Any, ...]:
    return str(row.dtype), not row.trainable, row.summed, row.copies(mesh), row.held_at, row.counted_elsewhere
