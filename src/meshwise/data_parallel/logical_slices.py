"""Give an optimizer, which updates slices of buckets, norms and full tensors of whole parameters (collectives)."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import BucketPiece
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.data_parallel.stored_slices import optimizer_slices
from meshwise.model.full_parameter_access import SlicePart


class LogicalSlices:
    """`LogicalTensors` that an optimizer receives as `logical` under a plan.

    `squared_norms` is one all-reduce over all ranks, with one fp64 number per trainable parameter. `whole` gathers each
    bucket once over the ranks that share it, and each parameter once over the axes of its layout.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = [row.name for row in engine.table.rows if row.trainable]
        self._parts: dict[nn.Parameter, tuple[SlicePart, ...]] = {}
        self._places: dict[str, tuple[Bucket, BucketPiece]] = {}
        for bucket in engine.buckets:
            self._places |= {piece.row.name: (bucket, piece) for piece in bucket.place.pieces}
            for part, parameter in optimizer_slices(bucket):
                inside = [(piece, _overlap(piece, part.start, part.stop)) for piece in bucket.place.pieces]
                self._parts[parameter] = tuple(
                    SlicePart(piece.row.name, low - part.start, high - part.start)
                    for piece, (low, high) in inside
                    if low < high
                )

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of an optimizer's slice, one for each model parameter in it, in order."""
        return self._parts[parameter]

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norm of `values` over each whole parameter, by name: fp64 scalars (a collective)."""
        world = self._engine.world
        totals = torch.zeros(len(self._names), dtype=torch.float64, device=world.device)
        index = {name: number for number, name in enumerate(self._names)}
        for bucket in self._engine.buckets:
            if bucket.counts:
                for part, parameter in optimizer_slices(bucket):
                    for piece in bucket.place.pieces:
                        low, high = _overlap(piece, max(part.start, bucket.shard[0]), min(part.stop, bucket.shard[1]))
                        if low < high:
                            own = values[parameter][low - part.start : high - part.start]
                            totals[index[piece.row.name]] += torch.linalg.vector_norm(own).double().square()
        world.all_reduce(totals, axes=world.mesh.names).wait()
        return dict(zip(self._names, totals, strict=True))

    def whole(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of `values`; the caller's changes are written back to `values` (collectives).

        `values`: by slice, a tensor of the slice's shape. Every rank iterates to the end. With a pipeline, a rank gets
        the parameters of its own stages.
        """
        world = self._engine.world

        def owned(bucket: Bucket) -> Tensor:
            return torch.cat([values[parameter] for _, parameter in bucket.slices])

        for row, gathered in self._engine.full_tensors(owned):
            full = gathered.clone()  # `gathered` may be a view of `values` or of other parameters
            yield row.name, full
            bucket, piece = self._places[row.name]
            stored = row.part(full, mesh=world.mesh, rank=world.rank).reshape(-1)
            for part, parameter in optimizer_slices(bucket):
                low, high = _overlap(piece, part.start, part.stop)
                if low < high:
                    changed = stored[low - piece.start : high - piece.start]
                    values[parameter][low - part.start : high - part.start] = changed


def _overlap(piece: BucketPiece, start: int, stop: int) -> tuple[int, int]:
    """Return (low, high) of the elements of a piece in [start, stop) of its bucket; none if low >= high."""
    return max(piece.start, start), min(piece.stop, stop)
