"""Give an optimizer, which updates slices of buckets, norms and full tensors of whole parameters (collectives)."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.data_parallel.parameter_owners import ParameterOwners
from meshwise.data_parallel.stored_slices import slice_pieces
from meshwise.model.full_parameter_access import Groups, SlicePart, WholeFunction


class LogicalSlices:
    """`LogicalTensors` that an optimizer receives as `logical` under a plan.

    `squared_norms` is one all-reduce over all ranks, of one fp64 number for each trainable parameter. The bytes of
    `map_whole` are in `parameter_owners`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = [row.name for row in engine.table.rows if row.trainable]
        self._parts: dict[nn.Parameter, list[SlicePart]] = {}
        self._owners: dict[frozenset[str], ParameterOwners] = {}
        for bucket in engine.buckets:
            for parameter, piece, here, _ in slice_pieces(bucket):
                part = SlicePart(piece.row.name, here.start, here.stop, piece.row.shape)
                self._parts.setdefault(parameter, []).append(part)

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of an optimizer's slice, one for each model parameter in it, in order."""
        return self._parts.get(parameter, ())  # a slice may be padding alone

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norm of `values` over each whole parameter, by name: fp64 scalars (a collective).

        The norm of a parameter without values on any rank is 0."""
        world = self._engine.world
        totals = torch.zeros(len(self._names), dtype=torch.float64, device=world.device)
        index = {name: number for number, name in enumerate(self._names)}
        for bucket in self._engine.buckets:
            if bucket.counts:
                for parameter, piece, here, _ in slice_pieces(bucket, within=bucket.shard):
                    if parameter in values:
                        norm = torch.linalg.vector_norm(values[parameter][here])
                        totals[index[piece.row.name]] += norm.double().square()
        world.all_reduce(totals, axes=world.mesh.names).wait()
        return dict(zip(self._names, totals, strict=True))

    def map_whole(
        self,
        values: Mapping[nn.Parameter, Tensor],
        *,
        groups: Groups,
        function: WholeFunction,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace the `values` of each whole parameter of `groups` by `function` of them; see `LogicalTensors`."""
        names = frozenset(name for group in groups for name in group["names"])
        if names not in self._owners:
            self._owners[names] = ParameterOwners(self._engine.buckets, names=names)
        self._owners[names].run(values, function=function, dtype=dtype)


def whole_tensors(values: Mapping[nn.Parameter, Tensor], *, engine: DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of `values`; the caller's changes are written back to `values` (collectives).

    `values`: by slice, a tensor of the slice's shape. Every rank iterates to the end."""
    places = {piece.row.name: (bucket, piece) for bucket in engine.buckets for piece in bucket.place.pieces}

    def owned(bucket: Bucket) -> Tensor:
        return torch.cat([values[parameter] for _, parameter in bucket.slices])

    for row, gathered in engine.full_tensors(owned):
        full = gathered.clone()  # `gathered` may be a view of `values` or of other parameters
        yield row.name, full
        bucket, piece = places[row.name]
        stored = row.part(full, mesh=engine.world.mesh, rank=engine.world.rank).reshape(-1)
        for parameter, _, here, there in slice_pieces(bucket, within=(piece.start, piece.stop)):
            values[parameter][here] = stored[there]
