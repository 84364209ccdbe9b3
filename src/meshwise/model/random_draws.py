"""Replace torch's random draws, so that each depends only on its place in the model and the batch (dropout, noise).

torch draws from a sequence: an element depends on all draws before it. So a split model would have other dropout masks
than a whole model, and the two could not be compared. Here a draw is a function of

    seed · step · number of the sample in the global batch · place in the model · index of the element

alone, and the step number is the only state (docs/architecture.md, "Random draws"). A rank computes the slice of the
full draw that its tensor needs. Key and slice follow from three facts:

    samples    `SampleRows`, from the trainer: the samples of the current micro-batch. They lie along dim 0 of the drawn
               tensor; the size of dim 0 is samples, samples · heads or samples · tokens. They lie along dim 1 if a
               module has `batch_first=False`, or if only the size of dim 1 is the number of samples.
    place      the module that draws, and the number of the draw in this call; for the module and each of its callers
               the number of the call, counted inside its caller. Hooks on the modules keep a stack of running calls.
    region     `ActivationRegion`, from tensor parallelism: the slice of the activations that the rank has

A forward that is repeated in the backward begins in the middle of the model. Its first module gets the place of its
call in the first forward. Draws raise an error if it was called in two places, or if the repeated function is no
module: then the place is ambiguous."""

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwise.comm.api.streams import generator_states, restore_generators, seed_generators, streams_of
from meshwise.model.fused_dropout import MaskNumbers, numbers_of_masks
from meshwise.model.random_bits import Distribution, IndexBlock, draw, draw_many, shaped
from meshwise.model.random_interception import RandomInterception

DrawPlace: TypeAlias = tuple[str, tuple[tuple[str, int], ...], int]
"""Place of a draw: name of the module, path of the calls around it, number of the draw in the call."""

_SMALL, _MOST = 2**16, 2**22
"""Most elements of one mask that is drawn ahead, and of all such masks together."""


class MaskRequest(NamedTuple):
    """A draw of a mask, or of its numbers; `slicing` is everything on which the slice of the full draw depends."""

    place: DrawPlace
    shape: tuple[int, ...]
    kind: Distribution | float
    """Distribution of the mask; for a mask's numbers, the probability of keeping an element."""
    device: torch.device
    slicing: tuple[Any, ...]


class MasksAhead:
    """Store of small masks and numbers of masks, drawn together as a step begins. `masks`: with slices, by request."""

    def __init__(self) -> None:
        self.masks: dict[MaskRequest, tuple[Any, IndexBlock]] = {}
        self._seen: dict[MaskRequest, IndexBlock] = {}

    def draw(self, key: Callable[[DrawPlace], int]) -> None:
        """Draw the masks that the last step used; `key` returns the key that a draw has in the new step."""
        parts, self._seen, left = self._seen, {}, _MOST
        groups: dict[Any, list[MaskRequest]] = {}
        for request, part in parts.items():
            groups.setdefault((part, request.kind, request.device), []).append(request)
        for (part, kind, device), requests in groups.items():
            rows = part.numel // part.shape[-1]
            left -= len(requests) * (rows + part.shape[-1] if isinstance(kind, float) else part.numel)
            if left >= 0:
                keys = [key(each.place) for each in requests]
                if isinstance(kind, float):
                    numbers = numbers_of_masks(part, keys=keys, keep=kind, device=device)
                    self.masks |= {each: (one, part) for each, one in zip(requests, numbers, strict=True)}
                else:
                    masks = zip(requests, draw_many(part, keys=keys, kind=kind, device=device), strict=True)
                    self.masks |= {each: (mask.view(each.shape), part) for each, mask in masks}

    def take(self, request: MaskRequest) -> Any:
        """Return the mask of a draw or its numbers, or None if they were not drawn ahead."""
        if (found := self.masks.get(request)) is None:
            return None
        mask, self._seen[request] = found
        return mask

    def remember(self, request: MaskRequest, *, part: IndexBlock) -> None:
        """Add a draw to the draws of the next step, if it is small and of neighbouring tokens."""
        if not part.places and (isinstance(request.kind, float) or part.numel <= _SMALL):
            self._seen[request] = part


DRAWING_MODULES = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.MultiheadAttention, nn.RReLU, nn.RNNBase, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
"""Classes of torch that draw. Modules of other torch classes get no hooks, unless they hold modules."""


@dataclass(frozen=True)
class SampleRows:
    """The samples of a micro-batch: `count` samples, from number `first` of the global batch on.

    `further(n)`: the samples of this micro-batch on the rank n places after this one along the axes of the batch. A
    count of 0: the samples are unknown, and draws raise an error."""

    first: int
    count: int
    further: "Callable[[int], SampleRows] | None" = field(default=None, repr=False, compare=False)

    def shifted(self, by: int) -> "SampleRows":
        """Return samples whose numbers are larger by `by`."""
        there = self.further
        further = None if there is None else lambda offset: there(offset).shifted(by)
        return SampleRows(self.first + by, self.count, further)


@dataclass(frozen=True)
class DimSlice:
    """A slice along one dim of the whole model's activations: `size` elements from `start` on.

    `dim` counts from the end (-1: features). If this dim of a tensor counts heads, start and size are converted to
    heads. A dim of size 1 (as in stochastic depth) is not split if `size` > 1, except in attention scores."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True)
class ActivationRegion:
    """Slices of the whole model's activations that this rank has in a part of the forward.

    | hidden        slices of tensors (samples, tokens, features)
    | scores        slices of attention scores (samples, heads, queries, keys), and of others with 4 dims or more
    | rank_offset   0: this rank's own samples; n: samples of the rank n places after it (`SampleRows.further`)

        | 1d, between the linear layers of a pair     hidden=(DimSlice(-1, f, n),), scores=(DimSlice(-3, f, n),)
        | sequence parallel, outside of pairs         hidden=(DimSlice(-2, t, n),)
        | 2d                                          hidden=(DimSlice(-1, f, n),), scores=(DimSlice(-3, f, n),)"""

    hidden: tuple[DimSlice, ...] = ()
    scores: tuple[DimSlice, ...] = ()
    rank_offset: int = 0


DrawState: TypeAlias = tuple["_Frame", ActivationRegion, SampleRows]
"""The running call, the region and the samples at a point of a forward; see `RandomDraws.snapshot`."""

RegionStarts: TypeAlias = Mapping[str, Callable[[], ActivationRegion]]
"""By module name, a function that returns the region that begins at the module."""


class ModuleVisit(NamedTuple):
    """Place of a module's call. `samples_first` is False if samples lie along dim 1."""

    path: tuple[tuple[str, int], ...]
    """The running calls, as (module name, number of the call from 0); first calls (number 0) are left out."""
    region: ActivationRegion
    samples_first: bool


_OUTSIDE = ModuleVisit((), ActivationRegion(), samples_first=True)
_NO_SAMPLE = -1


@dataclass
class _Frame:
    """A running call of a module. `visit` is None if the call belongs to a repeated forward and is ambiguous."""

    name: str
    visit: ModuleVisit | None
    calls: dict[str, int] = field(default_factory=dict)
    draws: int = 0
    intercepts: bool = False
    """The modes are active since this call, and until it ends."""

    def copied(self) -> "_Frame":
        """Return a copy with counts of its own."""
        return replace(self, calls=dict(self.calls), intercepts=False)


class RandomDraws:
    """Replacement of torch's random draws in one model on one rank, by hooks and modes.

    A region begins when a module named in `before` begins, or a module named in `after` has run. It lasts until the
    next one. `local` leaves the draws to torch's kernels and generator. Such kernels are fused on a GPU, but the masks
    then depend on the plan. The generator is seeded once for each forward. With regions, split tokens or other threads
    that draw, it is seeded for each draw, by the place and the region.

        draws.begin(step)
        with draws.running(rows): forward                 # once for each micro-batch
        with draws.running(rows, again=True): backward    # may repeat a forward
        draws.finish()

    docs/architecture.md says which modules have hooks after the first step ("Random draws"). A module that the first
    step did not run counts as one that draws. If torch's generator moves in a later step, a draw was missed."""

    def __init__(
        self,
        module: nn.Module,
        *,
        seed: int,
        before: RegionStarts | None = None,
        after: RegionStarts | None = None,
        local: bool = False,
        tokens: Any = None,
        alone: bool = False,
    ) -> None:
        """`tokens`: mode of tokens that are split over ranks, with the positions of this rank's tokens. `alone`: no
        other thread of this process draws from torch's generators."""
        self.local = local
        self._seeds_forwards = local and alone and not (before or after or tokens)
        self._names = list(dict.fromkeys(_plain(name) for name, _ in module.named_modules() if self._seeds_forwards))
        self._tokens = tokens
        self.unknown: set[str] = set()
        """Texts "operation in module" of the operations that drew from torch's own generator."""
        self.drew = False
        """True if the model has drawn since the step began."""
        self._module = module
        self._seed = seed
        self._before, self._after = before or {}, after or {}
        self._step = 0
        self._rows = SampleRows(0, 1)
        self._region = ActivationRegion()
        self._stack = [_Frame("", _OUTSIDE)]
        self._again = False
        self._visits: dict[str, set[ModuleVisit]] = {}
        self._modes = RandomInterception(self)
        self._handles: list[RemovableHandle] = []
        self._active = self._ran = False
        self._intercepts = False
        self._random_state: list[Tensor] = []
        self._callers: dict[str, set[str]] = {}
        self._drawing: set[str] = set()
        self.everywhere = not self._seeds_forwards
        """True until the end of the first step: it is not known yet which modules draw."""
        self._kept: frozenset[str] = frozenset()
        self._masks = MasksAhead()
        if not self._seeds_forwards:
            self._watch(None)

    def may_draw(self, name: str) -> bool:
        """Return whether module `name` or a module inside it drew in the first step, or did not run in it."""
        return any(one == name or one.startswith(f"{name}.") for one in self._kept)

    # ---- called by the trainer ---------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin step number `step`, which must be unique and the same under every plan."""
        self._step = step
        self._visits = {}
        self._ran = self.drew = False
        self._masks.masks = {}
        if self.everywhere:
            self._callers, self._drawing = {}, set()
        elif not self._seeds_forwards:
            self._random_state = generator_states()
            if step >= 0 and self._handles and not self.local:
                self._masks.draw(lambda place: _hash(self._seed, step, *place))

    def finish(self) -> None:
        """Finish the step; remove the hooks that did not serve a draw, or warn and add all if draws were missed."""
        if self.everywhere:
            if self._ran:
                self._settle()
        elif not self.unknown and not all(map(torch.equal, self._random_state, generator_states())):
            self.everywhere = True
            self._watch(None)
            warnings.warn(
                f"the model drew random numbers in step {self._step} for the first time. They came from torch's own "
                "generator and depend on the plan; the draws of later steps do not",
                stacklevel=3,
            )

    def _settle(self) -> None:
        """Keep the hooks of the modules that drew in this step or did not run, and of their callers."""
        self.everywhere = False
        if not self.drew:
            self.close()
            return
        absent = {name for name, one in self._module.named_modules() if not _never_draws(one)} - self._callers.keys()
        around = {
            ".".join(words[:depth]) for words in (name.split(".") for name in absent) for depth in range(len(words))
        }
        self._drawing |= absent
        kept, waiting = set[str](), {*self._drawing, *around}
        while waiting:
            name = waiting.pop()
            kept.add(name)
            waiting |= self._callers.get(name, set()) - kept
        self._kept = frozenset(kept)
        self._watch(kept)

    @contextlib.contextmanager
    def running(self, rows: SampleRows, *, again: bool = False) -> Iterator[None]:
        """Draw for the samples `rows` inside the block. `again`: a backward runs and may repeat a forward."""
        split = contextlib.nullcontext() if self._tokens is None else self._tokens.running(rows, again=again)
        if self._seeds_forwards:
            kept = generator_states()
            if not again:  # a backward repeats parts of a forward from the generator's state in it
                seed_generators(_digest(f"({self._seed}, {self._step}, {_as_text(rows)}, {self._names})") % 2**63)
            try:
                yield
            finally:
                restore_generators(kept)
            return
        if not self._handles:
            with split:
                yield
            return
        self._rows, self._again, self._region = rows, again, ActivationRegion()
        self._stack = [_Frame("", None if again else _OUTSIDE)]
        self._active = self._ran = True
        kept = generator_states() if self.local else []
        try:
            # The mode of split tokens is entered last, so it sees an attention first, and replaces it before its draws.
            wanted = self.everywhere or self._tokens is not None or ("" in self._drawing and not again)
            with self._intercepting(wanted=wanted), split:
                yield
        finally:
            while len(self._stack) > 1:  # an exception may have left calls behind
                self._end(self._stack.pop())
            self._active = False
            restore_generators(kept)

    @contextlib.contextmanager
    def _intercepting(self, *, wanted: bool) -> Iterator[None]:
        """Make the modes active inside the block if `wanted`; they may be active already."""
        frame = self._stack[-1]
        if wanted:
            self._start(frame)
        try:
            yield
        finally:
            self._end(frame)

    def _start(self, frame: _Frame) -> None:
        """Make the modes active until `_end` of this call, unless they are."""
        if not self._intercepts:
            self._intercepts = frame.intercepts = True
            self._modes.__enter__()

    def _end(self, frame: _Frame) -> None:
        if frame.intercepts:
            self._modes.__exit__(None, None, None)
            self._intercepts = frame.intercepts = False

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def snapshot(self) -> DrawState:
        """Return the point of the forward where the next draw is, for `restored`."""
        return self._stack[-1].copied(), self._region, self._rows

    @contextlib.contextmanager
    def restored(self, place: DrawState) -> Iterator[None]:
        """Repeat, inside the block, the draws that follow `place`."""
        before = self._stack, self._region, self._rows
        self._stack, self._region, self._rows = [self._stack[0], place[0].copied()], place[1], place[2]
        try:
            with self._intercepting(wanted=place[0].name in self._drawing):
                yield
        finally:
            self._stack, self._region, self._rows = before

    # ---- called by `RandomInterception` for a draw -------------------------------------------------------------

    def key(self) -> int:
        """Return the key of the next draw, a signed 64-bit hash of seed, step, place and number of the draw.

        Raises ValueError in a repeated forward if the place is ambiguous."""
        return _hash(self._seed, self._step, *self._place())

    def mask(self, shape: Sequence[int], *, kind: Distribution, device: torch.device, scores: bool) -> Tensor:
        """Return the next draw for a tensor of `shape`, read-only; see `part`. Raises ValueError as `key` does."""
        place = self._place()
        request = MaskRequest(place, tuple(shape), kind, device, self._slicing(scores))
        mask: Tensor | None = self._masks.take(request)
        if mask is None:
            part, turned = self.part(shape, scores=scores)
            mask = draw(part, key=_hash(self._seed, self._step, *place), kind=kind, device=device)
            mask = shaped(mask, shape=shape, turned=turned)
            if not (turned or self._region.rank_offset):  # other ranks' rows do not follow from this rank's
                self._masks.remember(request, part=part)
        return mask

    def numbers(self, shape: Sequence[int], *, keep: float, device: torch.device, scores: bool) -> MaskNumbers | None:
        """Return the numbers of the next draw's mask, which keeps with probability `keep`; see `part`. Return None, and
        do not draw, if the tensor's first two dims are swapped. Raises ValueError as `key` does."""
        part, turned = self.part(shape, scores=scores)
        if turned:
            return None
        place = self._place()
        request = MaskRequest(place, tuple(shape), keep, device, self._slicing(scores))
        numbers: MaskNumbers | None = self._masks.take(request)
        if numbers is None:
            key = _hash(self._seed, self._step, *place)
            (numbers,) = numbers_of_masks(part, keys=[key], keep=keep, device=device)
            if not self._region.rank_offset:
                self._masks.remember(request, part=part)
        return numbers

    def _slicing(self, scores: bool) -> tuple[Any, ...]:  # noqa: FBT001 - of two methods here
        return scores, self._rows.first, self._rows.count, self._region

    def _place(self) -> DrawPlace:
        self.drew = True
        frame = self._stack[-1]
        if not self._rows.count:
            raise ValueError(
                f"{frame.name or 'the model'} draws in a repeated forward, and the step has several to repeat. Use "
                "recompute=full in place of torch.utils.checkpoint, or call step.backward after each forward"
            )
        if self.everywhere:
            self._drawing.add(frame.name)
        if frame.visit is None:
            name = self._stack[1].name if len(self._stack) > 1 else ""
            what = "a function outside of any module draws random numbers in a repeated forward"
            if name:
                known = f"the first forward called it in {len(self._visits.get(name, ()))} places"
                what = f"{name} draws random numbers in a repeated forward, and {known}"
            raise ValueError(
                f"{what}, so the draw to repeat is not known; checkpoint the whole module that calls it "
                "(torch.utils.checkpoint), or do not repeat it"
            )
        frame.draws += 1
        return _plain(frame.name), frame.visit.path, frame.draws

    def part(self, shape: Sequence[int], *, scores: bool) -> tuple[IndexBlock, bool]:
        """Return the slice of the full draw for a tensor of `shape`, and whether its first two dims are swapped.

        `scores`: the tensor has attention scores, and its dim 0 is samples or samples · heads. The slice
        has at least two dims: first samples (start -1: the tensor has none), then dims that are split or above 1."""
        region, visit = self._region, self._stack[-1].visit or _OUTSIDE
        rows = self._rows.further(region.rank_offset) if self._rows.further and region.rank_offset else self._rows
        cuts, first, count = region.hidden, rows.first, rows.count
        if not visit.samples_first and len(shape) == 3 and (across := [cut for cut in cuts if cut.dim == -2]):
            cuts = tuple(cut for cut in cuts if cut.dim != -2)  # (tokens, samples, features): dim -2 is samples
            first, count = first + across[0].start, across[0].size
        turned = (
            not scores and len(shape) > 1 and shape[1] == count and not (visit.samples_first and shape[0] % count == 0)
        )
        dims = [shape[1], shape[0], *shape[2:]] if turned else list(shape)
        if dims and count and dims[0] % count == 0:
            dims = dims if dims[0] == count else [count, dims[0] // count, *dims[1:]]
            starts = [first]
        else:
            dims, starts = [1, *dims], [_NO_SAMPLE]
        starts += [0] * (len(dims) - 1)
        kept = {dim for dim, size in enumerate(dims) if dim == 0 or size != 1}
        positions = None if self._tokens is None or scores else self._tokens.positions()
        scores = scores or len(dims) > 3
        for cut in region.scores if scores else cuts:
            dim = len(dims) + cut.dim
            if dim > 0 and (scores or dim in kept or cut.size == 1):
                kept.add(dim)
                starts[dim] = cut.start * dims[dim] // max(1, cut.size)
        places: dict[int, Tensor] = {}
        if positions is not None and (dim := _token_dim(dims, cuts, count=positions.numel())):
            kept.add(dim)
            places[dim] = positions[starts[dim] : starts[dim] + dims[dim]]
        column = [] if len(kept) > 1 else [(1, 0)]
        sizes = [(dims[dim], starts[dim]) for dim in sorted(kept)] + column
        given = (*(places.get(dim) for dim in sorted(kept)), *(None for _ in column)) if places else ()
        return IndexBlock(tuple(size for size, _ in sizes), tuple(start for _, start in sizes), given), turned

    def reseed(self, device: torch.device) -> None:
        """Seed torch's generator of a device for the next draw under `random=local`, by key, samples and region."""
        positions = None if self._tokens is None else self._tokens.positions()
        where = "" if positions is None else f", {positions.tolist()}"
        seed = _digest(f"({self.key()!r}, {_as_text(self._rows)}, {_as_text(self._region)}{where})") % 2**63
        streams_of(device).generator().manual_seed(seed)

    def warn_not_replaced(self, operation: str) -> None:
        """Warn, once for each operation and module, that the operation drew from torch's own generator."""
        self.drew = True
        what = f"{operation} in {self._stack[-1].name or 'the model'}"
        if what not in self.unknown:
            self.unknown.add(what)
            warnings.warn(
                f"{what} draws from torch's own generator, so its draws depend on the plan; use dropout, torch.rand, "
                "torch.randn or torch.bernoulli, or take random=local",
                stacklevel=2,
            )

    # ---- the stack of calls ------------------------------------------------------------------------------------

    def _watch(self, names: Collection[str] | None) -> None:
        """Put hooks on the modules that may draw, or on those in `names`, and on modules where a region begins."""
        self.close()
        for name, module in self._module.named_modules():
            served = not _never_draws(module) if names is None else name in names
            if name in self._before or name in self._after or served:
                entering = functools.partial(self._enter, name, samples_first=_samples_first(module))
                self._handles.append(module.register_forward_pre_hook(entering))
                # `always_call`: activation checkpointing ends the forward that it repeats by an exception.
                leaving = functools.partial(self._leave, name)
                self._handles.append(module.register_forward_hook(leaving, always_call=True))

    def _enter(self, name: str, _module: nn.Module, _arguments: Any, *, samples_first: bool | None) -> None:
        if not self._active:
            return
        caller = self._stack[-1]
        number = caller.calls.get(name, 0)
        caller.calls[name] = number + 1
        if name in self._before:
            self._region = self._before[name]()
        if self._again and len(self._stack) == 1:
            seen = self._visits.get(name, set())
            visit = next(iter(seen)) if len(seen) == 1 else None
        elif caller.visit is None:
            visit = None
        else:
            first = caller.visit.samples_first if samples_first is None else samples_first
            path = (*caller.visit.path, (name, number)) if number else caller.visit.path
            visit = ModuleVisit(path, self._region, first)
        if visit is not None:
            self._region = visit.region
            self._visits.setdefault(name, set()).add(visit)
        self._stack.append(_Frame(name, visit))
        if self.everywhere:
            self._callers.setdefault(name, set()).add(caller.name)
        elif name in self._drawing:
            self._start(self._stack[-1])

    def _leave(self, name: str, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        if self._active and self._stack[-1].name == name and len(self._stack) > 1:
            self._end(self._stack.pop())
            if name in self._after:
                self._region = self._after[name]()


def _token_dim(dims: Sequence[int], cuts: Sequence[DimSlice], *, count: int) -> int:
    """Return the dim of a drawn tensor that has this rank's `count` tokens, or its slice of them; 0 if there is none.

    | (samples, tokens), (samples, tokens, features)
    | (samples, tokens, …, …), (samples, heads, tokens, …)"""
    sliced = next((cut.size for cut in cuts if cut.dim == -2), count)
    if len(dims) in (2, 3):
        return 1 if dims[1] in (sliced, count) else 0
    return next((dim for dim in (1, 2) if len(dims) > 3 and dims[dim] == count), 0)


def _never_draws(module: nn.Module) -> bool:
    """Return whether a module has no forward, or is of a class of torch, has no modules inside, and draws nothing."""
    if type(module).forward is nn.Module.forward:
        return True
    own = type(module).__module__.startswith("torch.nn.")
    return own and not isinstance(module, DRAWING_MODULES) and next(module.children(), None) is None


def _samples_first(module: nn.Module) -> bool | None:
    """Return `batch_first` of a module and its children: False if one of them is False, None if no module has it."""
    if isinstance(module, nn.RNNBase):
        return False  # between its layers samples lie along dim 1, whatever `batch_first` is
    flags = [getattr(part, "batch_first", None) for part in (module, *module.children())]
    return None if not any(isinstance(flag, bool) for flag in flags) else False not in flags


def _plain(name: str) -> str:
    """Return the name that a module has without torch.compile."""
    return f"{name}.".replace("_orig_mod.", "")[:-1]


def _hash(*parts: object) -> int:
    return _digest(repr(parts))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


_as_text = functools.lru_cache(maxsize=256)(repr)
