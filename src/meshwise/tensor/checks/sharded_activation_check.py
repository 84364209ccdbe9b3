"""A first forward is watched for what it does to parts of the stream as if they were all of it.

Under 2d, 2.5d and 3d a rank has some of the stream's features, under sequence parallelism some of its tokens. The
modules that play a part know that. Other operations there are right as long as every feature, or token, is independent.
A mean over them, a shift, or a product that contracts them differs between a part and the whole. So in the first
training forward every operation below autograd is looked at, outside of those modules and of all hooks:

    | x = blocks[0](x)             a part, along dim -2
    | y = x.flatten(0, 1) * 2      a part, inside of dim 0
    | x - x.mean(1)                refused: mixes what is split

And the gradient of a replicated tensor (a gate, a scale) that meets a part is the sum of all ranks' gradients. For
parameters that is known; for anything else it is refused. What is not known to mix is let pass.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.hooks import RemovableHandle

from meshwise.base.tensor_tree import tensors
from meshwise.model.dispatch_modes import TorchDispatchMode
from meshwise.model.forward import StageForwardLeft
from meshwise.model.parameter_table import Placement
from meshwise.tensor.checks.feature_mixing import (
    MixedFeaturesError,
    SplitDim,
    after,
    arguments,
    is_pointwise,
    is_product,
)
from meshwise.tensor.core.gathered_outputs import GatheredOutputs
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.core.tensor_origins import leaves
from meshwise.tensor.detect.matrix_modules import CONVOLUTIONS

_RETURN_IT = ("second", "single", "embedding", "positions", "patches", "norm")
_OTHERS = ("first", "head", "inner", "each_head")
"""Parts of modules that know what they are given of the stream: those that return it, and the others."""


@dataclass(frozen=True)
class HiddenSplit:
    """Split of the hidden states.

    what      of it, in words
    dim       of a stream, counted from the end
    count     how many of these this rank has now; 0 is nothing, or all
    instead   what to choose instead
    """

    what: str
    dim: int
    count: Callable[[], int]
    instead: str


_Noted: TypeAlias = dict[int, tuple[weakref.ref[Tensor], tuple[SplitDim, ...]]]


class ShardedActivationCheck(TorchDispatchMode):
    """Watches a model until its first forward with gradients is over.

    parts     the modules that play a part, which know what is split; with the dim in which what they return is a part
    blocks    what they are given and return is the stream; each with whether it is the last of its list
    names     of parameters: whose last dim is split as the stream is, and of which each rank may have a gradient of
              its own, as they are summed
    leaving   what brings parts together that the model returns
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        *,
        split: HiddenSplit,
        parts: Mapping[nn.Module, int | None],
        blocks: Mapping[nn.Module, bool],
        names: tuple[Collection[str], Collection[str]],
        leaving: GatheredOutputs,
    ) -> None:
        super().__init__()
        self._split = split
        self._parts = parts
        self._blocks = blocks
        self._names = names
        self._leaving = leaving
        self._held: set[nn.Parameter] = set()
        self._summed: set[nn.Parameter] = set()
        self._over = False
        self._asleep = 0
        self._within: list[tuple[str, int]] = []
        self._before = ""
        self._found: _Noted = {}
        self._counts: _Noted = {}
        self._entered = False
        self._taken: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._hooks: list[RemovableHandle] = []
        self._own = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    # ---- where the forward is ------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, _args: Any) -> None:
        if self._over:
            for handle in self._own:
                handle.remove()
        elif torch.is_grad_enabled():
            self._stop()  # of a forward that was interrupted
            self._asleep, self._entered = 0, False
            self._within.clear()
            parameters = dict(model.named_parameters(remove_duplicate=False))
            self._held, self._summed = (
                {parameters[name] for name in names if name in parameters} for names in self._names
            )
            self._hooks = [
                handle for name, module in model.named_modules() if name for handle in self._follow(module, name=name)
            ]
            self.__enter__()

    def _follow(self, module: nn.Module, *, name: str) -> list[RemovableHandle]:
        """Hooks are not watched, nor is a module that plays a part."""
        plays, said = module in self._parts, f"{name} ({type(module).__name__})"

        def first(_module: nn.Module, _args: Any) -> None:
            self._within.append((said, self._asleep))
            self._asleep += 1

        def ready(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            self._asleep -= not plays
            numbered = self._entered and any(_of(x, self._counts) for x in tensors((args, given)))
            if plays and numbered and self._split.dim == -2:
                raise ValueError(self._message("embedding", f"numbers the {self._split.what} of"))
            if module in self._blocks:
                self._entered = True
                self._mark(next(tensors((args, given.get("hidden_states"), given)), None), dim=self._split.dim)

        def done(_module: nn.Module, _args: Any, output: Any) -> None:
            self._asleep += not plays
            if module in self._blocks:
                self._mark(next(tensors(output), None), dim=self._split.dim)
                self._entered = not self._blocks[module]

        def last(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._within or self._within[-1][0] != said:
                return  # a hook before these raised an exception
            self._before, self._asleep = self._within.pop()
            dim = self._parts.get(module)
            if dim is not None:
                self._mark(next(tensors(output), None), dim=dim)

        return [
            module.register_forward_pre_hook(first, prepend=True),
            module.register_forward_pre_hook(ready, with_kwargs=True),
            module.register_forward_hook(done, prepend=True),
            module.register_forward_hook(last, always_call=True),
        ]

    def _end(self, model: nn.Module, _args: Any, output: Any) -> None:
        """End the check after a forward with output; a forward that raised is checked again, unless it left a stage."""
        parts = [x for x in tensors(output) if self._pieces(x) and not self._leaving.brings_together(x)]
        self._over = (
            bool(self._hooks) and not parts and (output is not None or isinstance(sys.exception(), StageForwardLeft))
        )
        self._stop()
        if parts:
            what = self._split.what
            raise ValueError(
                f"{type(model).__name__} returns, beside the stream, what it computed of it (a tensor of shape "
                f"{tuple(parts[0].shape)}), and a rank of tp has that of some {what} only: the loss would take those "
                f"for all. {self._split.instead}; or return it no more, if the loss has no use for it"
            )

    def _stop(self) -> None:
        if not self._hooks:
            return
        self.__exit__(None, None, None)
        for handle in self._hooks:
            handle.remove()
        self._found.clear()
        self._counts.clear()
        self._taken.clear()
        self._hooks = []

    # ---- which tensors are parts ---------------------------------------------------------------------------------

    def _mark(self, x: Tensor | None, *, dim: int) -> None:
        """Mark a tensor as hidden states if this rank has the expected number of features or tokens."""
        count = self._split.count()
        if x is not None and count and x.dim() >= -dim and x.size(dim) % count == 0:
            whole = self._split.dim == -1 and x.size(dim) != count
            self._note(x, () if whole else (SplitDim(x.dim() + dim, 1, count),))

    def _note(self, x: Tensor, pieces: Sequence[SplitDim]) -> None:
        if pieces:
            self._found[id(x)] = weakref.ref(x), tuple(pieces)
        else:
            self._found.pop(id(x), None)

    def _pieces(self, x: Tensor) -> tuple[SplitDim, ...]:
        return (SplitDim(x.dim() - 1, 1, x.size(-1)),) if x in self._held else _of(x, self._found)

    def _follow_count(self, func: OpOverload, *, given: Mapping[str, Any], made: Tensor) -> None:
        """Numbers as many as the rank has of what is split, and what is made of them: right only if it has all."""
        name, count = func.overloadpacket.__name__, self._split.count()
        pieces: tuple[SplitDim, ...] = ()
        if name == "arange" and made.numel() == count:
            pieces = (SplitDim(0, 1, count),)
        elif name == "slice" and not given["start"] and given["step"] == 1:
            dim = given["dim"] % made.dim()
            pieces = (SplitDim(dim, 1, count),) if made.size(dim) == count < given["self"].size(dim) else ()
        for operand, value in given.items():
            for x in tensors(value):
                if known := _of(x, self._counts):
                    with contextlib.suppress(MixedFeaturesError):
                        pieces = tuple(after(func, operand=operand, x=x, pieces=known, given=given, made=made))
        if pieces and count > 1:
            self._counts[id(made)] = weakref.ref(made), pieces

    # ---- what is done to them ------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        operands = list(tensors((args, kwargs)))
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if taken := next(filter(None, map(self._taken_out, operands)), ""):
            return self._use(func, taken, made=func(*args, **kwargs))
        if self._asleep:
            return func(*args, **kwargs)
        parts, counts = any(map(self._pieces, operands)), any(_of(x, self._counts) for x in operands)
        counts = self._entered and (counts or func.overloadpacket.__name__ in ("arange", "slice"))
        if not parts and not counts:
            return func(*args, **kwargs)
        given = arguments(func, args=args, kwargs=kwargs)
        if not parts:
            output = func(*args, **kwargs)
            for made in tensors(output):
                self._follow_count(func, given=given, made=made)
            return output
        if is_pointwise(func):
            self._require_fitting(func, given=given)
        output = func(*args, **kwargs)
        for made in tensors(output):
            pieces = self._together(func, given=given, made=made)
            if is_pointwise(func) or is_product(func):
                self._require_gradients(func, given=given, made=made, pieces=pieces)
            self._note(made, pieces)
        return output

    def _together(self, func: OpOverload, *, given: Mapping[str, Any], made: Tensor) -> Sequence[SplitDim]:
        """Return where a result is split; two operands must not be split in different dims. What is a part in one place
        meets nothing that is one in another.
        """
        found: set[tuple[SplitDim, ...]] = set()
        chosen = any(map(self._pieces, tensors(given.get("indices"))))
        for operand, value in given.items():
            for x in tensors(value):
                pieces = self._pieces(x)
                if not pieces or (chosen and operand != "values"):
                    continue
                try:
                    found.add(tuple(after(func, operand=operand, x=x, pieces=pieces, given=given, made=made)))
                except MixedFeaturesError:
                    message = self._message(func.overloadpacket.__name__, f"mixes the {self._split.what} of")
                    self._use(func, message, made=made)
        found.discard(())
        if len(found) > 1:
            raise ValueError(
                self._message(func.overloadpacket.__name__, f"brings together different {self._split.what} of")
            )
        return next(iter(found), ())

    def _require_fitting(self, func: OpOverload, *, given: Mapping[str, Any]) -> None:
        """Check that an operand that meets a split tensor element by element has its size."""
        operands, name = list(tensors(given)), func.overloadpacket.__name__
        for x, other in itertools.permutations(operands, 2):
            for piece in self._pieces(x):
                dim = piece.dim - x.dim()
                if any(count.dim - other.dim() == dim for count in _of(other, self._counts)):
                    raise ValueError(self._message(name, f"numbers the {self._split.what} of"))
                if not self._pieces(other) and other.dim() >= -dim and other.size(dim) not in (1, x.size(dim)):
                    does = f"has {other.size(dim)} for the {x.size(dim)} {self._split.what} of"
                    raise ValueError(self._message(name, does))

    def _require_gradients(
        self, func: OpOverload, *, given: Mapping[str, Any], made: Tensor, pieces: Sequence[SplitDim]
    ) -> None:
        """Check that a replicated operand of a split tensor gets its gradient from every rank."""
        if not pieces or not torch.is_grad_enabled():
            return
        for x in tensors(given):
            meets = [piece.dim - made.dim() for piece in pieces]
            alike = is_product(func) or any(x.dim() < -dim or x.size(dim) < made.size(dim) for dim in meets)
            if alike and x.requires_grad and not self._pieces(x) and not self._summed.issuperset(leaves(x)):
                does = "gives something that is trained, and that all ranks have alike, a gradient from"
                raise ValueError(self._message(func.overloadpacket.__name__, does))

    def _use(self, func: OpOverload, message: str, *, made: Any) -> Any:
        """Return some of a part was taken out as if it were all. For its sizes a forward may do so."""
        if not func.is_view:
            raise ValueError(message)
        self._taken |= {id(x): (weakref.ref(x), message) for x in tensors(made)}
        return made

    def _taken_out(self, x: Tensor) -> str:
        held, message = self._taken.get(id(x), (None, ""))
        return message if held is not None and held() is x else ""

    def _message(self, name: str, does: str) -> str:
        split, name = self._split, name.strip("_")
        if by_hand := next((type(module).__name__ for module in _running() if module in self._parts), ""):
            return (
                f"{self._within[-1][0] if self._within else 'the forward of the model'} runs the forward of a "
                f"{by_hand} without calling it. It has to bring together what a rank of tp has of the "
                f"{split.what} of the stream, and does so where it is called: module(x) in place of module.forward(x)"
            )
        where = self._within[-1][0] if self._within else f"the forward of the model, behind {self._before},"
        return (
            f"{where} {does} the stream ({name}), of which a rank of tp has some {split.what} only: it would compute "
            f"with those as if they were all. {split.instead}"
        )


def _of(x: Tensor, noted: _Noted) -> tuple[SplitDim, ...]:
    found = noted.get(id(x))
    return found[1] if found is not None and found[0]() is x else ()


def _running() -> Iterator[nn.Module]:
    """Yield the modules whose forward is on the stack, innermost first."""
    for frame, _line in traceback.walk_stack(None):
        itself = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if frame.f_code.co_name == "forward" and isinstance(itself, nn.Module):
            yield itself


def watch(
    model: nn.Module,
    *,
    parts: Mapping[str, tuple[Part, Scheme]],
    inside: SplitContext,
    width: int,
    placed: Mapping[str, Placement],
    leaving: GatheredOutputs,
) -> None:
    """Watch a model that was split into `parts`, each with the scheme of its place, until its first forward is over.

    `inside`: where the stream of `width` features is split; `placed`: every parameter, by all of its names.
    """
    scheme = inside.scheme
    held: tuple[str, ...] = ()
    index = inside.world.group(scheme.stream or scheme.tokens).index
    if scheme.stream:
        own = inside.stream_sizes(width)[index]
        split = HiddenSplit("features", -1, lambda: own, "Under tp_mode=1d every rank has all of them")
        held = tuple(f"{name}." for name, (part, _) in parts.items() if part.role == "vector")
    else:
        said = "With sequence_parallel=0 every rank has all of them"
        split = HiddenSplit("tokens", -2, lambda: (inside.extents.tokens or {index: 0})[index], said)
    modules = dict(model.named_modules(remove_duplicate=False))
    playing: dict[nn.Module, int | None] = {}
    for name, (part, place) in parts.items():
        if name in modules and (part.role in (*_RETURN_IT, *_OTHERS) or part.becomes is not None):
            module = modules[name]
            returned = part.role not in _OTHERS and not part.inner and bool(place.stream or place.tokens)
            channels = -1 - len(module.kernel_size) if isinstance(module, CONVOLUTIONS) else split.dim
            playing[module] = channels if returned else None
    stacked = [name for name, (part, _) in parts.items() if part.role == "block"]
    lasts = {name.rpartition(".")[0]: name for name in stacked}
    blocks = {modules[name]: lasts[name.rpartition(".")[0]] == name for name in stacked}
    split_too = [name for name in placed if f"{name}.".startswith(held)]
    summed = [name for name, at in placed.items() if {*scheme.stream, *scheme.tokens} <= {*at.summed}]
    ShardedActivationCheck(model, split=split, parts=playing, blocks=blocks, names=(split_too, summed), leaving=leaving)
