"""Gradient reduction: which tensors a rank keeps in full or as a shard, and which collectives sum the gradients.

The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5) are four reductions. docs/architecture.md has what
each keeps ("The life of a parameter"), docs/synchronisation.md its collectives.

A reduction may keep state between steps, such as a compression error or the momentum of an outer optimizer: one
tensor per logical parameter. The state counts as memory, is saved, and is resharded when a checkpoint is loaded.

Compressed reductions send few bytes: quantised, sparse or of low rank, with the error kept for the next step. A
rank's message is its gradient plus the error of its last message. N ranks, a bucket in N shards:

    | codec      1 encode N shards, all-to-all ─ 2 each owner adds up its shard ─ 3 encode, all-gather (zero=0 alone)
    | powersgd   1 all-reduce M Q = P ─ 2 orthogonalise P ─ 3 all-reduce Mᵀ P = Q; the sum is P Qᵀ

What a codec loses stays in `error` (Karimireddy et al., arXiv 1901.09847), also on the owners of step 3. PowerSGD
(Vogels et al., arXiv 1905.13727) takes Q of the last step for the next one; after a load it begins anew.

docs/synchronisation.md has the bytes of each codec. A block of 256 elements has its own fp32 scale: its largest
magnitude, or its mean magnitude for `1bit`. `qsgd` rounds up with a probability that makes the expected value exact
(Alistarh et al., arXiv 1610.02132). Its random numbers are hashed from value, place and scale, without state."""

import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import Axes, Work, World
from meshwise.data_parallel.bucket_layout import BucketPiece, BucketPlace
from meshwise.plan.plan_keys import Wire


@dataclass(frozen=True)
class Reduction:
    """Kind of gradient reduction: which tensors a rank keeps as shards. The collectives of a step follow from this."""

    shards_updates: bool = False
    """Each rank updates only its shard of the parameters."""
    shards_gradients: bool = False
    """Reduced gradients are kept as shards, so they are reduced after each micro-batch, not once a step."""
    shards_parameters: bool = False
    """Parameters are kept as shards, gathered before a unit runs and freed when the next unit runs."""
    servers: int = 0
    """Number of ranks at the end of the group that hold the shards; the other ranks then have none. 0: all ranks do."""
    keeps_own_gradients: bool = False
    """No collective sums gradients: each rank keeps all elements of its own, and pushes them to servers."""
    owned_state: tuple[str, ...] = ()
    """Names of state tensors for the elements that this rank updates, in the dtype of the masters."""
    summed_state: tuple[str, ...] = ()
    """Names of state tensors that every rank keeps for all elements, in the dtype of accumulated gradients. Ranks have
    different values, whose sum is the logical tensor."""
    owner_state: tuple[str, ...] = ()
    """The names of `summed_state` with which each rank keeps a second tensor, of its shard: `NAME/owner`."""

    def start(self, gradients: Tensor, *, into: Tensor | None, peers: "ReducingRanks") -> "ReducedPart":
        """Start to sum `gradients`, (elements,) in the wire dtype, over the ranks. It may overwrite `gradients`.

        The result is the elementwise sum: if `shards_updates`, only this rank's shard, else all elements. `into`
        receives the shard, (elements of the shard,). None: the result stays in `gradients`."""
        world, axes, shard = peers.world, peers.axes, peers.shard
        if self.keeps_own_gradients:
            return ReducedPart(Work(), gradients)
        if self.servers:
            parts = peers.parts(gradients)
            target = parts[world.group(axes).index]
            return ReducedPart(world.reduce_scatter(parts, into=target, axes=axes), target)
        if not self.shards_updates:
            return ReducedPart(world.all_reduce(gradients, axes=axes), gradients)
        target = gradients[shard] if into is None else into
        return ReducedPart(world.reduce_scatter(gradients, into=target, axes=axes), target)

    def start_replicas(self, values: Tensor, *, peers: "ReducingRanks") -> "ReducedPart":
        """Start to add up `values`, (elements of the shard,), of the replicas of this rank's shard, in place."""
        return ReducedPart(peers.world.all_reduce(values, axes=peers.outer), values)


@dataclass(frozen=True)
class ReducingRanks:
    """Ranks of one reduction, with the shard and the state of this rank.

    | world, axes   the ranks whose gradients are summed; `near`: those of `axes` inside a node, all without `hpz`
    | outer         axes whose ranks hold replicas of the shard
    | shard         elements of the bucket that are this rank's shard
    | state         the tensors of `owned_state`, `summed_state` and `owner_state`, by name; `start` may write to them.
    |               It may add others, which are not saved
    | place         places of the parameters in the bucket"""

    world: World
    axes: Axes
    near: Axes
    outer: Axes
    shard: slice
    state: MutableMapping[str, Tensor]
    place: BucketPlace

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.group(self.axes).size

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return the shard of each rank as a view of `whole`, (elements of the bucket,)."""
        return [whole[slice(*self.place.shard(index))] for index in range(self.size)]

    def clear_padding(self, values: Tensor, *, start: int) -> Tensor:
        """Zero the padding in `values`, the elements of the bucket from `start` on; return `values`."""
        for low, high in self.place.padding:
            values[max(low - start, 0) : max(high - start, 0)].zero_()
        return values


class ReducedPart(NamedTuple):
    """A reduction that has started: `values` hold the sum once `work` is done."""

    work: Work
    values: Tensor


ZERO: Mapping[int, Reduction] = {
    0: Reduction(),
    1: Reduction(shards_updates=True),
    2: Reduction(shards_updates=True, shards_gradients=True),
    3: Reduction(shards_updates=True, shards_gradients=True, shards_parameters=True),
}
"""The reduction of each stage of ZeRO, by its number."""


BLOCK = 256
"""Elements that share a scale."""


@dataclass(frozen=True)
class LevelCodec:
    """Uniform quantisation to `bits` bits (1, 4 or 8), with rounding to the nearest, or stochastic if `random`."""

    bits: int
    random: bool = False

    def encode(self, values: Tensor) -> Tensor:
        """Return scales and codes as bytes, (rows, bytes)."""
        blocks, elements = _blocks(values), values.shape[-1]
        if self.bits == 1:
            counts = torch.full(blocks.shape[1:2], BLOCK, dtype=values.dtype, device=values.device)
            counts[-1] = elements - (blocks.shape[1] - 1) * BLOCK
            scales = (blocks.abs().sum(-1) / counts).float()
            codes = blocks >= 0
        else:
            scales, top = blocks.abs().amax(-1).float(), self._top
            ratios = (blocks / scales.clamp(min=_SMALLEST).unsqueeze(-1).to(values.dtype)).mul_(top)
            shift = _hashed(blocks, scales) if self.random else 0.5
            codes = ratios.add_(shift).floor_().clamp_(-top, top).add_(top).to(torch.uint8)
        # A word has a code in each byte. The product adds shifted copies of it: all codes meet in its highest byte.
        last = 8 // self.bits - 1
        words = codes.flatten(1)[:, :elements].contiguous().view(_WORDS[last])
        packed = (words * sum(1 << 8 * last + (self.bits - 8) * n for n in range(last + 1)) >> 8 * last).to(torch.uint8)
        return torch.cat([scales.view(torch.uint8), packed], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return codes times scales, (rows, elements)."""
        scales, body = _scales(packed, elements)
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=packed.device)
        if self.bits == 1:  # a table of the eight signs of each byte
            numbers = torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
            signs = (numbers >> shifts & 1).to(dtype).mul_(2).sub_(1)
            return _scaled(nn.functional.embedding(body.int(), signs).flatten(1), scales)
        codes = (body.unsqueeze(-1) >> shifts & (1 << self.bits) - 1).flatten(1)
        return _scaled(codes.to(dtype).sub_(self._top).div_(self._top), scales)

    @property
    def _top(self) -> int:
        return (1 << self.bits - 1) - 1


@dataclass(frozen=True)
class Float8Codec:
    """float8_e4m3 with a scale for each block."""

    def encode(self, values: Tensor) -> Tensor:
        """Return scales and values as bytes, (rows, bytes)."""
        blocks = _blocks(values)
        # On a GPU torch divides by a number as it multiplies by 1 / number, which rounds otherwise than on a CPU.
        scales = blocks.abs().amax(-1).float() * (1 / torch.finfo(torch.float8_e4m3fn).max)
        scaled = blocks / scales.clamp(min=_SMALLEST).unsqueeze(-1).to(values.dtype)
        body = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)[:, : values.shape[-1]]
        return torch.cat([scales.view(torch.uint8), body], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return values times scales, (rows, elements)."""
        scales, body = _scales(packed, elements)
        return _scaled(body.contiguous().view(torch.float8_e4m3fn).to(dtype), scales)


@dataclass(frozen=True)
class TopCodec:
    """The largest elements of a row by magnitude, a `fraction` of them, with their indices."""

    fraction: float

    def encode(self, values: Tensor) -> Tensor:
        """Return the values and int32 indices as bytes, (rows, bytes)."""
        kept = max(1, round(self.fraction * values.shape[-1]))
        index = values.abs().topk(kept, dim=-1, sorted=False).indices
        return torch.cat([values.gather(-1, index).view(torch.uint8), index.int().view(torch.uint8)], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the sent values at their places and 0 elsewhere, (rows, elements)."""
        middle = packed.shape[1] // (dtype.itemsize + 4) * dtype.itemsize
        found, index = packed[:, :middle].reshape(-1).view(dtype), packed[:, middle:].reshape(-1).view(torch.int32)
        values = torch.zeros(len(packed), elements, dtype=dtype, device=packed.device)
        return values.scatter_(-1, index.long().view(len(packed), -1), found.view(len(packed), -1))


Codec: TypeAlias = LevelCodec | Float8Codec | TopCodec
"""A way to write rows of numbers as rows of bytes. A value that is not finite is not finite after decoding.

`encode` takes (rows, elements), elements a multiple of 16, and returns uint8 (rows, bytes); `decode` reverses it."""

CODECS: Mapping[str, Callable[[float], Codec]] = {
    "int8": lambda _: LevelCodec(8),
    "int4": lambda _: LevelCodec(4),
    "fp8": lambda _: Float8Codec(),
    "1bit": lambda _: LevelCodec(1),
    "qsgd": lambda bits: LevelCodec(int(bits), random=True),
    "topk": TopCodec,
}
"""Codec for each name in the key `wire`, from its number."""

_WORDS = MappingProxyType({0: torch.uint8, 1: torch.int16, 7: torch.int64})
"""Integer type of n + 1 bytes, by n."""
_SMALLEST = 1e-30
"""Least divisor of a block, so that a block of zeros stays zero."""


def _blocks(values: Tensor) -> Tensor:
    """Return rows as blocks, (rows, blocks, BLOCK), the last one filled up with zeros."""
    blocks: Tensor = nn.functional.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _scales(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Return the scales, (rows, blocks), and the remaining bytes of encoded rows."""
    size = -(-elements // BLOCK) * 4
    return packed[:, :size].reshape(-1).view(torch.float32).view(len(packed), -1), packed[:, size:]


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows (rows, elements), in place, by the scales of their blocks; return them."""
    whole, own = values.shape[-1] // BLOCK, scales.to(values.dtype).unsqueeze(-1)
    values[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(own[:, :whole])
    values[:, whole * BLOCK :].mul_(own[:, -1])
    return values


def _hashed(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a number in [0, 1) for each element, hashed from its bits, its place in the block, and the scale."""
    place = torch.arange(BLOCK, device=blocks.device) * 0x85EBCA6B
    mixed = blocks.float().view(torch.int32).long() * 0x9E3779B1 + place
    mixed = mixed + scales.view(torch.int32).long().unsqueeze(-1) * 0xC2B2AE35
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    found: Tensor = ((mixed >> 15) & 0xFFFFFF).to(blocks.dtype) / 2**24
    return found


@dataclass(frozen=True)
class CodecReduction(Reduction):
    """Sum of encoded gradients, with the errors of `codec` in the state `error` if that is one of `summed_state`."""

    codec: Codec = field(default_factory=lambda: CODECS["int8"](0))

    def start(self, gradients: Tensor, *, into: Tensor | None, peers: ReducingRanks) -> ReducedPart:
        """Start to sum encoded gradients, as in `Reduction.start`."""
        if peers.size == 1 or not gradients.is_floating_point():
            if (error := peers.state.get("error")) is not None:  # `start_replicas` may have added to it
                gradients.add_(error)
                error.zero_()
            return super().start(gradients, into=into, peers=peers)
        if not self.shards_updates:
            sent = self._send(gradients, peers, lambda sums: self._share(sums, gradients, peers))
            return ReducedPart(sent, gradients)
        target = gradients[peers.shard] if into is None else into
        return ReducedPart(self._send(gradients, peers, target.copy_), target)

    def _send(self, gradients: Tensor, peers: ReducingRanks, done: Callable[[Tensor], Any]) -> Work:
        """Start to send each rank its encoded shard; at the end call `done` with the sum of this rank's shard.

        With several nodes, a rank first sums, inside its node, the shards of ranks with its index in their nodes."""
        far = [axis for axis in peers.axes if axis not in peers.near]
        nodes, size = peers.world.group(far).size, len(gradients) // peers.size
        packed = self._encoded(gradients, peers, name="error", start=0, nodes=nodes)
        received = torch.empty_like(packed)
        sent = peers.world.all_to_all(packed, into=received, axes=peers.near)

        def add_up() -> None:
            sent.wait()
            sums = self.codec.decode(received, elements=nodes * size, dtype=gradients.dtype).sum(0)
            if nodes > 1:
                packed, lost = self._packed_and_lost(sums.view(nodes, size))
                between = torch.empty_like(packed)
                sent_between = peers.world.all_to_all(packed, into=between, axes=far)
                if (error := peers.state.get("error")) is not None:
                    error.view(nodes, -1, size)[:, peers.world.group(peers.near).index].add_(lost)
                    peers.clear_padding(error, start=0)
                sent_between.wait()
                sums = self.codec.decode(between, elements=size, dtype=gradients.dtype).sum(0)
            done(peers.clear_padding(sums, start=peers.shard.start))

        return Work(finish=add_up)

    def start_replicas(self, values: Tensor, *, peers: ReducingRanks) -> ReducedPart:
        """Start to add up the encoded shards of the replicas. Compression errors are added to the state `error`."""
        if not values.is_floating_point():
            return super().start_replicas(values, peers=peers)
        group = peers.world.group(peers.outer)
        parts = nn.functional.pad(values, (0, -len(values) % (16 * group.size))).view(group.size, -1)
        packed, lost = self._packed_and_lost(parts)
        received = torch.empty_like(packed)
        sent = peers.world.all_to_all(packed, into=received, axes=peers.outer)

        def share() -> None:
            sent.wait()
            sums = self.codec.decode(received, elements=parts.shape[1], dtype=values.dtype).sum(0, keepdim=True)
            packed, more = self._packed_and_lost(sums)
            lost[group.index].add_(more[0])
            peers.world.all_gather(packed, into=received, axes=peers.outer).wait()
            found = self.codec.decode(received, elements=parts.shape[1], dtype=values.dtype)
            peers.clear_padding(values.copy_(found.view(-1)[: len(values)]), start=peers.shard.start)
            if (error := peers.state.get("error")) is not None:
                peers.clear_padding(error[peers.shard].add_(lost.view(-1)[: len(values)]), start=peers.shard.start)

        return ReducedPart(Work(finish=share), values)

    def _packed_and_lost(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoded rows, and their compression errors."""
        packed = self.codec.encode(parts)
        return packed, _finite(parts - self.codec.decode(packed, elements=parts.shape[1], dtype=parts.dtype))

    def _share(self, sums: Tensor, gradients: Tensor, peers: ReducingRanks) -> None:
        """Send the sum of this rank's shard, encoded, to every rank; put what all ranks send into `gradients`."""
        packed = self._encoded(sums, peers, name="error/owner", start=peers.shard.start)
        received = packed.new_empty(peers.size, packed.shape[1])
        peers.world.all_gather(packed, into=received, axes=peers.axes).wait()
        gradients.copy_(self.codec.decode(received, elements=len(sums), dtype=sums.dtype).view(-1))
        peers.clear_padding(gradients, start=0)

    def _encoded(self, values: Tensor, peers: ReducingRanks, *, name: str, start: int, nodes: int = 1) -> Tensor:
        """Return `values` plus the state `name`, if it is kept, as an encoded row for each rank of a node.

        The compression error becomes the state. `values` are the elements of the bucket from `start` on."""
        error, size = peers.state.get(name), peers.place.size // peers.size
        parts = (values if error is None else values.add_(error)).view(nodes, -1, size).transpose(0, 1).flatten(1)
        packed, lost = self._packed_and_lost(parts)
        if error is not None:
            error.view(nodes, -1, size).copy_(lost.view(-1, nodes, size).transpose(0, 1))
            peers.clear_padding(error, start=start)
        return packed


@dataclass(frozen=True)
class LowRankReduction(Reduction):
    """Sum of gradients, with each matrix approximated by factors of `rank` (PowerSGD); vectors are summed exactly."""

    rank: int = 4

    def start(self, gradients: Tensor, *, into: Tensor | None, peers: ReducingRanks) -> ReducedPart:
        """Start to sum the products of matrices with the factors of the last step, and the vectors."""
        if peers.size == 1 or not gradients.is_floating_point():
            return super().start(gradients, into=into, peers=peers)
        error = peers.state.get("error")
        if error is not None:
            gradients.add_(error)
        pieces = [piece for piece in peers.place.pieces if self._is_split(piece)]
        matrices = [gradients[piece.start : piece.stop].view(piece.shape[0], -1) for piece in pieces]
        ends = [0, *(end for piece in pieces for end in (piece.start, piece.stop)), peers.place.size]
        rest = [gradients[low:high] for low, high in zip(ends[::2], ends[1::2], strict=True)]
        if "factors" not in peers.state:
            peers.state["factors"] = torch.cat([gradients[:0], *(self._begin(piece, gradients) for piece in pieces)])
        widths = [matrix.shape[1] * self.rank for matrix in matrices]
        right = [flat.view(-1, self.rank) for flat in peers.state["factors"].split(widths)]
        first = torch.cat([*((m @ q).view(-1) for m, q in zip(matrices, right, strict=True)), *rest])
        work = peers.world.all_reduce(first, axes=peers.axes)

        def project() -> None:
            work.wait()
            *products, sums = first.split([*(len(m) * self.rank for m in matrices), sum(map(len, rest))])
            left = [torch.linalg.qr(flat.view(-1, self.rank)).Q for flat in products]
            second = torch.cat([gradients[:0], *((m.T @ p).reshape(-1) for m, p in zip(matrices, left, strict=True))])
            own = second.clone() if error is not None else second
            again = peers.world.all_reduce(second, axes=peers.axes)
            if error is not None:
                error.zero_()
                for piece, m, p, q in zip(pieces, matrices, left, own.split(widths), strict=True):
                    error[piece.start : piece.stop] = _finite(m - p @ q.view(-1, self.rank).T).view(-1)
            again.wait()
            # The sum is the same on every rank; nan in the factors would reach every later step.
            peers.state["factors"] = torch.where(second.isfinite().all(), second, peers.state["factors"])
            for m, p, q in zip(matrices, left, second.split(widths), strict=True):
                torch.mm(p, q.view(-1, self.rank).T, out=m)
            for part, found in zip(rest, sums.split([len(part) for part in rest]), strict=True):
                part.copy_(found)
            if into is not None:
                into.copy_(gradients[peers.shard])

        mine = gradients if not self.shards_updates else gradients[peers.shard] if into is None else into
        return ReducedPart(Work(finish=project), mine)

    def _is_split(self, piece: BucketPiece) -> bool:
        """Return whether a piece is a matrix with more elements than its two factors together."""
        if len(piece.shape) < 2 or piece.start == piece.stop:
            return False
        height, elements = piece.shape[0], piece.stop - piece.start
        return self.rank * (height + elements // height) < elements

    def _begin(self, piece: BucketPiece, like: Tensor) -> Tensor:
        """Return the first factor of a matrix, (width · rank,): normal numbers seeded by the parameter's name."""
        generator = torch.Generator().manual_seed(zlib.crc32(piece.row.name.encode()))
        width = (piece.stop - piece.start) // piece.shape[0]
        return torch.randn(width * self.rank, generator=generator, dtype=torch.float64).to(like)


def compressed(plain: Reduction, *, wire: str, feedback: bool) -> Reduction:
    """Return the reduction of a ZeRO stage, `plain`, with encoded gradients; `plain` itself if `wire` is a dtype.

    wire: a value of the plan's key. feedback: keep the errors for the next step."""
    codec, kept = Wire.parse(wire), dict(vars(plain))
    if codec.codec == "none":
        return plain
    if feedback:
        kept["summed_state"] = ("error",)
    if codec.codec == "powersgd":
        return LowRankReduction(**kept, rank=int(codec.number))
    if feedback and not plain.shards_updates:
        kept["owner_state"] = ("error",)
    return CodecReduction(**kept, codec=CODECS[codec.codec](codec.number))


def _finite(error: Tensor) -> Tensor:
    """Return the error with 0 where it is not finite: such a step is not applied, and must not spoil later ones."""
    return error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
