"""One flat buffer and everything that hangs on it: parameters, gradients, and the slice this rank owns.

A ZeRO stage is a choice of which of these buffers are whole on every rank and which exist only as this rank's shard
(Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5):

    stage   parameters (used)   gradients        owned, updated by the optimizer    traffic of a step
    0       whole               whole            everything                         all-reduce(gradients)
    1       whole               whole            shard                              reduce-scatter + all-gather
    2       whole               shard            shard                              the same, a reduce a micro-batch
    3       shard               shard            shard                              + one all-gather more

A whole buffer of a stage that keeps only a shard exists while a unit needs it, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwise.comm.world import Work, World
from meshwise.data_parallel.place import Options, Place
from meshwise.model.table import Row


@dataclass(frozen=True)
class Replication:
    """How parameters are kept over the ranks that share them."""

    world: World
    axes: tuple[str, ...]
    zero: int

    @property
    def size(self) -> int:
        """How many ranks share the parameters."""
        return self.world.group(self.axes).size

    @property
    def index(self) -> int:
        """Which of the equal shards is this rank's."""
        return self.world.group(self.axes).index


class Bucket:
    """The parameters of one unit that share dtype, trainability and the axes over which they are replicated.

    `whole` is the buffer that the model's parameters view: its storage is empty while a ZeRO-3 unit is at rest.
    `owned` is the slice [start, stop) this rank updates; `master` holds it in at least fp32 and is `owned` itself
    when the dtypes are equal. `slices` are what an optimizer updates: the parts of the master that share options.
    """

    def __init__(self, rows: Sequence[Row], *, replication: Replication) -> None:
        self.replication = replication
        world = replication.world
        shapes = {row.name: row.layout.local_shape(row.shape, mesh=world.mesh, rank=world.rank) for row in rows}
        self.place = Place.of(rows, shapes=shapes, parts=replication.size)
        self.dtype = rows[0].dtype
        self.trainable = rows[0].trainable
        self.device = world.device
        copies = rows[0].copies(world.mesh)
        self.counts = not rows[0].spare and all(world.group(axis).index == 0 for axis in copies)
        self.at_rest = replication.zero == 3 and replication.size > 1
        self.shard = self.place.shard(replication.index)
        self.owned = (0, self.place.size) if replication.zero == 0 else self.shard
        # What the other ranks read is made by the world: published slices, shards at rest, gradients.
        empty = replication.world.empty
        if replication.zero in (1, 2):
            self.whole = empty(self.place.size, dtype=self.dtype)
        else:
            self.whole = torch.empty(self.place.size, dtype=self.dtype, device=self.device)
        self.kept = empty(self.shard[1] - self.shard[0], dtype=self.dtype) if self.at_rest else self.whole
        self._bytes = self.whole.untyped_storage().nbytes()
        if self.at_rest:
            self.whole.untyped_storage().resize_(0)
        self.gradient: Tensor | None = None
        self.reduced: Tensor | None = None
        self.master: Tensor | None = None
        self.slices: list[tuple[Options, nn.Parameter]] = []
        self._filled: set[int] = set()
        self._arriving: tuple[Work, Tensor] | None = None
        self._rounds = 0

    @property
    def has_master(self) -> bool:
        """Whether what is updated is a copy of the parameters in a wider type."""
        return self.master is not None and self.master.dtype != self.dtype

    # ---- parameters --------------------------------------------------------------------------------------------

    def fill(self, values: Iterable[Tensor]) -> None:
        """Take the full parameters in piece order, one at a time; keep what this rank stores."""
        mesh, rank = self.replication.world.mesh, self.replication.world.rank
        start, stop = self.shard if self.at_rest else (0, self.place.size)
        self.kept.zero_()
        for piece, value in zip(self.place.pieces, values, strict=True):
            low, high = max(piece.start, start), min(piece.stop, stop)
            if low < high:
                part = piece.row.part(value.detach(), mesh=mesh, rank=rank).reshape(-1)
                self.kept[low - start : high - start].copy_(part[low - piece.start : high - piece.start])
        if self.trainable:
            self._make_master()

    def _make_master(self) -> None:
        own = self.kept if self.at_rest else self.whole[slice(*self.owned)]
        self.master = own if self.dtype.itemsize >= 4 else own.float()
        if self.replication.zero >= 2:
            self.reduced = torch.zeros_like(self.master)
        low, high = self.owned
        for run in self.place.runs:
            if part := run.within(low, stop=high):
                self.slices.append((part.options, nn.Parameter(self.master[part.start - low : part.stop - low])))

    def views(self) -> list[Tensor]:
        """The full parameters, in piece order, as views of `whole`."""
        return [self.whole[piece.start : piece.stop].view(piece.shape) for piece in self.place.pieces]

    def gather(self) -> Work:
        """Make `whole` whole again from the shards."""
        self.whole.untyped_storage().resize_(self._bytes)
        return self.replication.world.all_gather(self.kept, into=self.whole, axes=self.replication.axes)

    def free(self) -> None:
        """Give the memory of `whole` back; its views stay valid for the next gather."""
        self.whole.untyped_storage().resize_(0)

    def publish(self) -> Work:
        """Bring the updated master into the parameters of all ranks."""
        assert self.master is not None
        own = self.kept if self.at_rest else self.whole[slice(*self.owned)]
        if self.master.dtype != self.dtype:
            own.copy_(self.master)
        if self.replication.zero in (1, 2):
            return self.replication.world.all_gather(own, into=self.whole, axes=self.replication.axes)
        return Work()

    # ---- gradients ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        assert self._arriving is None
        self._filled.clear()
        self._rounds = 0

    def deposit(self, index: int, *, gradient: Tensor) -> None:
        """Add one parameter's gradient to what this step has accumulated."""
        piece = self.place.pieces[index]
        view = self._buffer()[piece.start : piece.stop].view(piece.shape)
        value = gradient if gradient.layout == torch.strided else gradient.to_dense()
        if index in self._filled:
            view.add_(value)
        else:
            view.copy_(value)
            self._filled.add(index)

    def accumulated(self, index: int) -> Tensor:
        """One parameter's gradient as this rank has accumulated it in this step, zero without any; to be written to."""
        piece = self.place.pieces[index]
        view = self._buffer()[piece.start : piece.stop].view(piece.shape)
        if index not in self._filled:
            view.zero_()
            self._filled.add(index)
        return view

    def _buffer(self) -> Tensor:
        if self.gradient is None:
            assert self.master is not None
            self.gradient = self.replication.world.empty(self.place.size, dtype=self.master.dtype)
            self.gradient[slice(*self.place.padding)].zero_()
        return self.gradient

    def start_reduce(self) -> None:
        """Sum the gradients of all ranks into the owned slice; parameters without a gradient count as zero."""
        buffer = self._buffer()
        for index, piece in enumerate(self.place.pieces):
            if index not in self._filled:
                buffer[piece.start : piece.stop].zero_()
        world, axes, zero = self.replication.world, self.replication.axes, self.replication.zero
        if zero == 0:
            self._arriving = (world.all_reduce(buffer, axes=axes), buffer)
            self.reduced = buffer
        elif zero == 1:
            self.reduced = buffer[slice(*self.shard)]
            self._arriving = (world.reduce_scatter(buffer, into=self.reduced, axes=axes), buffer)
        else:
            assert self.reduced is not None
            target = self.reduced if self._rounds == 0 else torch.empty_like(self.reduced)
            self._arriving = (world.reduce_scatter(buffer, into=target, axes=axes), target)
            self._filled.clear()
        self._rounds += 1

    def settle(self) -> None:
        """Wait for the reduction that is under way, if any."""
        if self._arriving is None:
            return
        work, target = self._arriving
        work.wait()
        self._arriving = None
        if self.replication.zero >= 2:
            assert self.reduced is not None
            if self._rounds > 1:
                self.reduced.add_(target)
            self.gradient = None

    def counted(self) -> Tensor:
        """The part of the reduced gradient that this rank counts: over all ranks, every logical element once."""
        assert self.reduced is not None
        shard = self.reduced[slice(*self.shard)] if self.replication.zero == 0 else self.reduced
        return shard if self.counts else shard[:0]

    def lend_gradients(self) -> None:
        """Let the optimizer's slices see their parts of the reduced gradient."""
        assert self.reduced is not None
        low = 0
        for _, parameter in self.slices:
            parameter.grad = self.reduced[low : low + parameter.numel()]
            low += parameter.numel()

    def full_gradient(self) -> Tensor:
        """The whole reduced gradient on every rank (a collective)."""
        assert self.reduced is not None
        if self.replication.zero == 0:
            return self.reduced
        whole = torch.empty(self.place.size, dtype=self.reduced.dtype, device=self.device)
        self.replication.world.all_gather(self.reduced.contiguous(), into=whole, axes=self.replication.axes).wait()
        return whole

    # ---- memory ------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        """Bytes on this rank now: parameters (with fp32 masters), gradients, and parameters gathered for use."""
        parameters = _nbytes(self.kept)
        if self.master is not None and self.master.dtype != self.dtype:
            parameters += _nbytes(self.master)
        gradients = _nbytes(self.gradient) + (_nbytes(self.reduced) if self.replication.zero >= 2 else 0)
        gathered = self.whole.untyped_storage().nbytes() if self.at_rest else 0
        return {"parameters": parameters, "gradients": gradients, "gathered": gathered}


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
