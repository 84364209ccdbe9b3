"""Run a stage: a part of a model, by the model's own forward.

Rewriting a model into a list of layers breaks everything that is not a list of layers: keyword arguments, masks, rotary
tables, an encoder and a decoder. So a stage *is* the model, with the same class, names and forward. The pieces
(embedding, blocks, norm, head) of other stages have no parameters in it and do not compute:

    the model        embedding   block 0   block 1   block 2   block 3   norm   head
    stage 1 of 3     (nan)       (nan)     received  computes  computes  leaves
                                           │                         │
                                           output of block 1 ──►     └──► output of block 3

- what lies between pieces, masks and rotary tables and residual sums, runs on every stage, from the same batch;
- a piece of an earlier stage returns its own received output where a later piece needs it. Otherwise it returns NaN of
  the right shape and dtype, so that a missing value cannot pass unnoticed;
- the first piece of a later stage leaves the forward.

A stage may begin inside of a block (`split_blocks.py`). The modules in that block are then pieces, and the block's own
forward runs on both sides; for other stages it is one piece like any other.

Which outputs cross, and that pieces run in one order, the cut has seen on an example (`model_cut.py`).
"""

import contextlib
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.forward import StageForwardLeft
from meshwise.model.torch_private import without_modes
from meshwise.pipeline.cut.meta_values import sizes_known
from meshwise.pipeline.cut.module_hooks import PieceBackwardHooks
from meshwise.pipeline.run.packed_tree import enter


class StageError(RuntimeError):
    """Error for a run of a stage that differs from the example of the cut."""


Place: TypeAlias = tuple[bool, int, dict[str, Any]]
"""Point of a run: whether a run is open, the number of the next piece, the received values."""


@dataclass(frozen=True)
class FeatureWidth:
    """Sizes of the hidden states under tensor parallelism: features and tokens, on a rank and in total.

    `made` maps pieces that make hidden states of something else, as an embedding does, to the dim of the features.
    `tokens` returns the number of tokens (on this rank, in total) in the current forward; it counts inside `blocks`.
    """

    own: int = 0
    whole: int = 0
    made: Mapping[str, int] = field(default_factory=dict)
    tokens: Callable[[], tuple[int, int]] = lambda: (0, 0)
    blocks: Collection[str] = ()

    def ask(self, shadow: nn.Module, *, name: str, args: Any, kwargs: Any) -> Any:
        """Return this rank's part of the output of piece `name`, as meta tensors.

        `shadow` is the piece as on one process: it receives all features and tokens.
        """
        own, whole = self.tokens()
        if own == whole or not any(name == block or name.startswith(f"{block}.") for block in self.blocks):
            return self._ask(shadow, name=name, args=args, kwargs=kwargs)
        # Masks and rotary tables have all tokens; hidden states have the part of this rank.
        hidden = _first((args, kwargs.get("hidden_states")))
        if hidden is None or hidden.dim() < 2 or hidden.size(-2) != own or not hidden.is_floating_point():
            return self._ask(shadow, name=name, args=args, kwargs=kwargs)
        wide = hidden.new_empty(*hidden.shape[:-2], whole, hidden.size(-1))
        args, kwargs = map_tensors(lambda x: wide if x is hidden else x, (args, kwargs))
        returned = self._ask(shadow, name=name, args=args, kwargs=kwargs)
        out = _first(returned)
        if out is None or out.dim() < 2 or out.size(-2) != whole:
            return returned
        return map_tensors(lambda x: x.narrow(-2, 0, own) if x is out else x, returned)

    def _ask(self, shadow: nn.Module, *, name: str, args: Any, kwargs: Any) -> Any:
        if name in self.made and self.own != self.whole:
            dim = self.made[name]
            return map_tensors(lambda x: self._part(x, dim=dim), shadow(*args, **kwargs))
        first = next(tensors((args, kwargs)), None)
        if first is None or not first.is_floating_point() or self.own == self.whole:
            return shadow(*args, **kwargs)

        def change(x: Tensor, size: int, to: int) -> Tensor:
            matches = x.dtype == first.dtype and x.dim() == first.dim() and x.size(-1) == size
            return x.new_empty(*x.shape[:-1], to) if matches else x

        args, kwargs = map_tensors(lambda x: change(x, self.own, self.whole), (args, kwargs))
        returned = shadow(*args, **kwargs)
        if first.size(-1) != self.own:
            return returned
        return map_tensors(lambda x: change(x, self.whole, self.own), returned)

    def _part(self, x: Tensor, *, dim: int) -> Tensor:
        split = x.dim() >= -dim and x.size(dim) == self.whole and x.is_floating_point()
        return x.narrow(dim, 0, self.own) if split else x


def _first(tree: Any) -> Tensor | None:
    return next(tensors(tree), None)


class StageForwardState:
    """Values that the current run of a stage has received and computed; the stage uses one object for all runs."""

    def __init__(self, sends: Sequence[str], *, changed: Collection[str], same_shape: Collection[str]) -> None:
        self.sends, self.changed, self.same_shape = sends, changed, same_shape
        self.nan = NanPlaceholder()
        self.width = FeatureWidth()
        self.open = self.repeats = False
        self.received: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        self.position = 0

    def start(self, received: Mapping[str, Any]) -> None:
        """Begin a run."""
        self.open, self.position = True, 0
        self.received = enter(received)
        self.sent = {}
        for key, value in self.received.items():
            self.keep(key, value=value)

    def keep(self, key: str, *, value: Any) -> None:
        """Store a value to send at the end, if a later stage needs it; a copy, if the model will change it."""
        if key in self.sends and not self.repeats:
            self.sent[key] = map_tensors(Tensor.clone, value) if key in self.changed else value

    def received_of(self, key: str) -> Any:
        """Return a value that an earlier stage sent; a copy, if the model will change it."""
        value = self.received[key]
        return map_tensors(Tensor.clone, value) if key in self.changed else value

    def device_for(self, given: Tensor) -> torch.device:
        """Return the device for a result of `given`, which is on the meta device if the model moved it to a parameter's
        device.
        """
        here = (tensor.device for tensor in tensors(self.received))
        return next(here, given.device) if given.is_meta else given.device

    def leave(self) -> None:
        """Leave the model's forward by an exception, unless a block is run again."""
        if not self.repeats:
            raise StageForwardLeft

    def snapshot(self) -> Place:
        """Return the point that the forward has reached, for `restored` (`model.forward_replay.RememberedState`)."""
        return self.open, self.position, self.received

    @contextlib.contextmanager
    def restored(self, place: Place) -> Iterator[None]:
        """Run a block again inside, from this point on."""
        left, repeated = self.snapshot(), self.repeats
        (self.open, self.position, self.received), self.repeats = place, True
        try:
            yield
        finally:
            (self.open, self.position, self.received), self.repeats = left, repeated

    def stop(self) -> dict[str, Any]:
        """End a run and return the values to send."""
        sent = self.sent
        self.open, self.received, self.sent = False, {}, {}
        return sent


class Stage:
    """Part of a model that one rank runs: stage `index` of `count`.

    `module` holds this stage's parameters under the names that they have in the whole model. A parameter that several
    stages hold (a tie) is a parameter in each: their gradients have to be summed.
    """

    def __init__(
        self, module: nn.Module, *, index: int, count: int, state: StageForwardState, receives: Sequence[str]
    ) -> None:
        self.module = module
        self.index = index
        self.count = count
        self.receives = tuple(receives)
        self.state = state

    @property
    def sends(self) -> tuple[str, ...]:
        """Keys of the values that `run` returns for the next stage; empty on the last stage."""
        return tuple(self.state.sends)

    def run(self, call: Callable[[nn.Module], Any], *, received: Mapping[str, Any]) -> Any:
        """Return the result of one forward. `call` runs the model on a micro-batch, as in
        `lambda model: loss(model(tokens), targets)`.

        The last stage returns what `call` returns, any other a tree of tensors for every key in `sends`. `received` is
        the result of the stage before; its tensors that require gradients are leaves and get `.grad` in the backward.

        Raises StageError when pieces run in another order than in the example of the cut.
        """
        self.state.start(received)
        try:
            returned = call(self.module)
        except StageForwardLeft:
            return self.state.stop()
        finally:
            self.state.open = False
        self.state.stop()
        if self.index + 1 < self.count:
            raise StageError(f"the model's forward ended on stage {self.index}, before it reached the next stage")
        return returned


class PieceForward:
    """Forward of a piece in a stage: each call computes, returns the received output, or returns NaN."""

    def __init__(self, module: nn.Module, *, shadow: nn.Module, route: "StageRoute", state: StageForwardState) -> None:
        self._module, self._shadow, self._route, self._state = module, shadow, route, state
        self._hooks = PieceBackwardHooks(module, computes=route.computes(module))
        self._shapes: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the `forward` of the module."""
        state, route = self._state, self._route
        if not state.open:  # called by torch's checkpoint in the backward, or by the user
            return self._own(args, kwargs)
        key = route.key(state.position, module=self._module)
        if state.position >= route.stop:
            state.leave()
        own = route.start <= state.position < route.stop
        state.position += 1
        if own:
            output = self._own(args, kwargs)
            state.keep(key, value=output)
            return output
        if key in state.received:
            return state.received_of(key)
        return self._nothing(key, args, kwargs)

    def _own(self, args: Any, kwargs: Any) -> Any:
        return self._hooks.around(partial(type(self._module).forward, self._module), args=args, kwargs=kwargs)

    def _nothing(self, key: str, args: Any, kwargs: Any) -> Any:
        """Return NaN in the shapes of the piece's output."""
        state = self._state
        first = next(tensors((args, kwargs)), torch.empty(()))
        shapes = first if key in state.same_shape else self._shapes_for(key, args, kwargs)
        fresh = key in state.changed
        device = state.device_for(first)
        return map_tensors(lambda like: state.nan.like(like, device=device, fresh=fresh), shapes)

    def _shapes_for(self, key: str, args: Any, kwargs: Any) -> Any:
        """Return the output of the piece as meta tensors, computed once per input shapes."""
        asked = (self._module.training, self._state.width.tokens(), signature((args, kwargs)))
        if asked not in self._shapes:
            self._shadow.train(self._module.training)
            args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
            try:
                # A norm over the batch of all ranks would ask the others.
                with torch.no_grad(), torch._C.DisableTorchFunction(), without_modes(), sizes_known():
                    self._shapes[asked] = self._crossing.width.ask(
                        self._shadow, name=key.partition(":")[0], args=args, kwargs=kwargs
                    )
            except Exception as error:
                raise StageError(f"the shape of the output of {key} depends on values: {error}") from error
        return self._shapes[asked]


class SplitBlockForward:
    """Forward of an opened block: its modules are pieces, and the block itself is the last piece."""

    def __init__(self, module: nn.Module, *, route: "StageRoute", state: StageForwardState) -> None:
        self._module, self._route, self._state = module, route, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the `forward` of the module."""
        output = type(self._module).forward(self._module, *args, **kwargs)
        state = self._state
        key = self._route.key(state.position, module=self._module)
        if state.position >= self._route.stop:
            state.leave()
        state.position += 1
        state.keep(key, value=output)
        return output


class NanPlaceholder:
    """Source of NaN tensors (integers: 0) of any shape in one memory; a stage of a deep model returns many."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, *, device: torch.device, fresh: bool) -> Tensor:
        """Return NaN in the shape and dtype of a tensor; with `fresh`, in memory that may be written to."""
        place = (tensor.dtype, device)
        flat = self._flat.get(place)
        if fresh or flat is None or flat.numel() < tensor.numel() or flat._version:
            value = math.nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
            with torch.inference_mode(mode=False):  # a tensor of inference mode has no version
                flat = torch.full((tensor.numel(),), value, dtype=tensor.dtype, device=device)
            if fresh:
                return flat.view(tensor.shape)
            self._flat[place] = flat
        return flat[: tensor.numel()].view(tensor.shape)


class StageRoute:
    """Order of the calls of all pieces, and the range that one stage computes."""

    def __init__(self, keys: Sequence[str], *, modules: Sequence[nn.Module], start: int, stop: int) -> None:
        self._keys, self._modules = keys, modules
        self.start, self.stop = start, stop

    def computes(self, module: nn.Module) -> bool:
        """Return whether the stage computes a call of this module."""
        return any(one is module for one in self._modules[self.start : self.stop])

    def key(self, position: int, *, module: nn.Module) -> str:
        """Return the key of the call at this position. Raises StageError if it is not a call of `module`."""
        if position >= len(self._keys) or self._modules[position] is not module:
            due = self._keys[position] if position < len(self._keys) else "the end"
            name = next(key for key, one in zip(self._keys, self._modules, strict=True) if one is module)
            raise StageError(
                f"{name} runs where {due} was due; a pipeline needs a model whose pieces always run in the same order"
            )
        return self._keys[position]


def signature(tree: Any, *, other: Callable[[Any], Hashable] = lambda value: type(value).__qualname__) -> Any:
    """Return a hashable key of inputs: equal keys give equal output shapes. It has shapes, dtypes and plain values.

    `other` maps any other value to its key.
    """
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if is_dataclass(tree) and not isinstance(tree, type):
        return tuple((field.name, signature(getattr(tree, field.name), other=other)) for field in fields(tree))
    if isinstance(tree, Mapping):
        return tuple((key, signature(value, other=other)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return tuple(signature(value, other=other) for value in tree)
    if isinstance(tree, float) and math.isnan(tree):  # NaN does not equal itself
        return repr(tree)
    return tree if isinstance(tree, int | float | str | None) else other(tree)
