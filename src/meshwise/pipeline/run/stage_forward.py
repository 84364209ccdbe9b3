"""Run one pipeline stage of a model with the model's own forward, in which the pieces of other stages do not compute.

A model rewritten as a list of layers loses everything else: keyword arguments, masks, rotary tables, an encoder and a
decoder. So a stage *is* the model, with the same class, names and forward. In a stage, the pieces (embedding, blocks,
norm, head) of other stages have no parameters and do not compute (docs/pipeline.md has a picture):

- code between pieces (masks, rotary tables, residual sums) runs on every stage, from the same batch;
- a piece of an earlier stage returns its output as this stage received it, if a later piece needs the output. Otherwise
  it returns NaN in the output's shape and dtype, so a use of it is noticed. The stage before sends the shapes;
- the first piece of a later stage ends the forward by an exception.

A stage may begin inside a block (`probe_result.inner_modules`). On the two stages that share this split block, its
modules are pieces, and its own forward runs. On any other stage the block is one piece.

The cut (`model_cut.py`) determines on an example which outputs are sent and in which order the pieces run."""

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.deferred_init import shapes_of
from meshwise.model.forward import StageForwardLeft
from meshwise.model.module_copy import copy_modules
from meshwise.model.torch_private import without_dispatch_modes
from meshwise.pipeline.cut.model_cut import REMEDY, ModelCut
from meshwise.pipeline.run.stage_backward import enter


class StageError(RuntimeError):
    """Error for a stage that runs differently than on the example from which the model was cut."""


ForwardPoint: TypeAlias = tuple[bool, int, dict[str, Any], dict[str, Any]]
"""Point in a forward: (True inside a forward, number of the next call of a piece, received values, `shapes`)."""


class StageForwardState:
    """State of a stage's current forward: received values, values to send, and the place among the calls of pieces."""

    def __init__(self, cut: ModelCut, *, index: int, modules: Sequence[nn.Module]) -> None:
        """`modules`: the module of each call in `cut.contents(index)`."""
        self.sends = cut.sends[index] if index + 1 < cut.stages else ()
        self.changed, self.same_shape = cut.changed, cut.same_shape
        self._contents, self._modules = cut.contents(index), modules
        self.open = self.repeats = self.note_shapes = False
        self.received: dict[str, Any] = {}
        self.shapes: dict[str, Any] = {}
        """Outputs of pieces so far as meta tensors, by key; without those of `same_shape`."""
        self.sent: dict[str, Any] = {}
        self.last_nan: Tensor | None = None
        """NaN that the last piece of another stage returned; the next such piece returns it again."""
        self.position = 0

    def start(self, received: Mapping[str, Any], *, shapes: Mapping[str, Any], note_shapes: bool) -> None:
        """Begin a forward with the values and shapes from the stage before, by key.

        `note_shapes`: add the outputs of this stage's pieces to `shapes`."""
        self.open, self.position, self.note_shapes = True, 0, note_shapes
        self.shapes = dict(shapes)
        self.received = enter(received)
        self.sent = {}
        for key, value in self.received.items():
            self.keep(key, value=value)

    def advance(self, module: nn.Module) -> tuple[str, bool]:
        """Return the key of the next call, which is of `module`, and whether this stage computes it.

        Before a call of a later stage, end the model's forward by raising StageForwardLeft, unless a block is being
        repeated in the backward. Raises StageError if the next call is of another module."""
        keys, position = self._contents.keys, self.position
        if position >= len(keys) or self._modules[position] is not module:
            due = keys[position] if position < len(keys) else "the end"
            name = next(key for key, one in zip(keys, self._modules, strict=True) if one is module)
            raise StageError(
                f"{name} runs where {due} was due; a pipeline needs a model whose pieces always run in the same order"
            )
        if position >= self._contents.stop and not self.repeats:
            raise StageForwardLeft
        self.position += 1
        return keys[position], self._contents.start <= position < self._contents.stop

    def keep(self, key: str, *, value: Any) -> None:
        """Store the output of call `key` if this stage sends it; a copy, if the model will change it in place."""
        if self.repeats:
            return
        if key in self.sends:
            self.sent[key] = map_tensors(Tensor.clone, value) if key in self.changed else value
        if self.note_shapes and key not in self.same_shape:
            with without_dispatch_modes():  # a rehearsal counts no memory for it
                self.shapes[key] = map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), value)

    def output_shapes(self, key: str, *, module: nn.Module, first: Tensor) -> Any:
        """Return the output of a piece of an earlier stage as meta tensors. `first`: its first input.

        A rehearsal leaves out stages that equal another; their shapes come from a piece of the same class."""
        modules = zip(self._contents.keys, self._modules, strict=True)
        same_class = (other for other, one in modules if type(one) is type(module))
        return next((self.shapes[other] for other in (key, *same_class) if other in self.shapes), first)

    def snapshot(self) -> ForwardPoint:
        """Return the point that the forward has reached, for `restored` (see `RememberedState`)."""
        return self.open, self.position, self.received, self.shapes

    @contextlib.contextmanager
    def restored(self, place: ForwardPoint) -> Iterator[None]:
        """Inside it, run a block of the model again from this point on."""
        left, repeated = self.snapshot(), self.repeats
        (self.open, self.position, self.received, self.shapes), self.repeats = place, True
        try:
            yield
        finally:
            (self.open, self.position, self.received, self.shapes), self.repeats = left, repeated

    def stop(self) -> dict[str, Any]:
        """End the forward, drop its values, and return the values to send, by key."""
        sent = self.sent
        self.open, self.received, self.sent, self.last_nan = False, {}, {}, None
        return sent


@dataclass(eq=False)
class Stage:
    """Stage `index` of the `count` stages of a model.

    `module` holds this stage's parameters under their names in the whole model. A tied parameter is a parameter of each
    of its stages, and their gradients must be summed. `receives`: keys of the values from the stage before."""

    module: nn.Module
    index: int
    count: int
    state: StageForwardState
    receives: tuple[str, ...]

    def run(
        self,
        call: Callable[[nn.Module], Any],
        *,
        received: Mapping[str, Any],
        shapes: Mapping[str, Any] = MappingProxyType({}),
        note_shapes: bool = True,
    ) -> Any:
        """Run one forward of the stage, and return its result.

        `call(model)` runs the model on a micro-batch, as in `lambda model: loss(model(tokens), targets)`. `received` is
        the result of the stage before; its tensors that require gradients are leaves and get `.grad` in the backward.
        `shapes`: `state.shapes` of the stage before. `note_shapes`: add the outputs of this stage's pieces to a copy.
        The last stage returns the result of `call`; any other stage returns a tree of tensors for each key it sends.
        Raises StageError when pieces run in another order than on the example of the cut."""
        self.state.start(received, shapes=shapes, note_shapes=note_shapes)
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
    """Replacement for the forward of a piece in a stage: it computes, returns the received output, or returns NaN."""

    def __init__(self, module: nn.Module, *, state: StageForwardState) -> None:
        self.compiled: Callable[..., Any] | None = None
        """Compiled forward of the piece under `compile=blocks`."""
        self._module, self._state = module, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the `forward` of the module."""
        state = self._state
        if not state.open:  # called by torch's checkpoint in the backward, or by the user
            return self._own(args, kwargs)
        key, own = state.advance(self._module)
        if own:
            output = self._own(args, kwargs)
            state.keep(key, value=output)
            return output
        if key in state.received:
            value = state.received[key]
            return map_tensors(Tensor.clone, value) if key in state.changed else value
        return self._nan_output(key, args, kwargs)

    def _own(self, args: Any, kwargs: Any) -> Any:
        # tp changes the class of the module after this object is made.
        forward = self.compiled or partial(type(self._module).forward, self._module)
        return forward(*args, **kwargs)

    def _nan_output(self, key: str, args: Any, kwargs: Any) -> Any:
        """Return NaN in the shapes and dtypes of the piece's output."""
        state = self._state
        first = args[0] if args and isinstance(args[0], Tensor) else next(tensors((args, kwargs)), torch.empty(()))
        if first is state.last_nan and not first._version and key in state.same_shape and key not in state.changed:
            return first
        shapes = first if key in state.same_shape else state.output_shapes(key, module=self._module, first=first)
        fresh, device = key in state.changed, first.device
        if first.is_meta:  # the model moved the input to the device of a remote parameter
            device = next((tensor.device for tensor in tensors(state.received)), device)
        made = map_tensors(lambda like: nan_like(like, device=device, fresh=fresh), shapes)
        state.last_nan = made if isinstance(made, Tensor) and not (fresh or made.is_meta) else None
        return made


def _split_block_forward(module: nn.Module, state: StageForwardState, /, *args: Any, **kwargs: Any) -> Any:
    """Run a split block: its modules are pieces, and the rest of its code is a last piece."""
    output = type(module).forward(module, *args, **kwargs)
    key, _ = state.advance(module)
    state.keep(key, value=output)
    return output


def nan_like(tensor: Tensor, *, device: torch.device, fresh: bool) -> Tensor:
    """Return NaN (integers: 0) in the shape and dtype of a tensor. If `fresh`, in its own memory, to be written to."""
    if not torch.compiler.is_compiling() and _nan(tensor.dtype, device)._version:  # a model has written to it
        _nan.cache_clear()
    if device.type == "meta" and not fresh:  # contiguous like the piece's own output, so that no operation copies it
        with without_dispatch_modes():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    nan = _nan(tensor.dtype, device).expand(tensor.shape)
    return nan.clone(memory_format=torch.contiguous_format) if fresh else nan


@cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    # A rehearsal must not record an operation that runs once per process. Tensors of inference mode have no versions.
    with without_dispatch_modes(), torch.inference_mode(mode=False):
        return torch.full((), value, dtype=dtype, device=device)


def signature(tree: Any, *, other: Callable[[Any], Hashable] = lambda value: type(value).__qualname__) -> Any:
    """Return a hashable key of a tree of inputs: its shapes, dtypes and plain values.

    `other`: returns the key of a value of any other type."""
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


_CASTS = frozenset((Tensor.to, Tensor.type_as))
"""Functions that convert their first tensor to the dtype of their second tensor."""
_LIKE = frozenset((*_CASTS, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.is_same_size))
"""Functions that read the shape or dtype of their second tensor; their result is on the device of the first."""

_SHAPED = frozenset(
    (
        *(Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros),
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like, torch.rand_like, torch.randn_like),
    )
)
"""Functions that make a new tensor in another tensor's shape or dtype; with a given `device`, it has real values."""


class RemoteParameter(Tensor):
    """Parameter or buffer of another stage; it has a shape and a dtype. Computing with it raises StageError.

    A meta tensor is not enough: torch multiplies a CPU tensor by a meta tensor without an error, and returns arbitrary
    memory. TorchScript and `torch.tensor` ignore subclasses of Tensor, so they still return arbitrary memory."""

    known_as: str
    """Name of the parameter or buffer in the model."""

    @staticmethod
    def named(name: str, *, like: Tensor) -> "RemoteParameter":
        """Return a remote parameter with this name in the model, in the shape and dtype of `like`."""
        one = like.detach().as_subclass(RemoteParameter)
        one.known_as = name
        return one

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a remote result for remote parameters alone. Raises StageError for computations with other tensors."""
        known = kwargs or {}
        given = list(tensors((args, known)))
        where = next(tensor.__dict__["known_as"] for tensor in given if isinstance(tensor, RemoteParameter))
        asked = func in _LIKE and not isinstance(args[0], RemoteParameter)
        if not asked and any(not isinstance(tensor, RemoteParameter) for tensor in given):
            raise StageError(
                f"a stage computes with {where}, which another stage holds; on the example it did not need {where}. If "
                "the script calls trainer.model itself, as generate does, call trainer.predict: with pp a rank has one "
                f"stage. Else: {REMEDY}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if asked and func in _CASTS:
                return args[0].to(next(tensor.dtype for tensor in given if isinstance(tensor, RemoteParameter)))
            found = func(*args, **known)
            if asked or (func in _SHAPED and "device" in known):
                return found
            return map_tensors(lambda tensor: RemoteParameter.named(where, like=tensor), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteParameter":
        return self


def make_stage(model: nn.Module, *, cut: ModelCut, index: int, like: nn.Module | None = None) -> Stage:
    """Return stage `index` of a model. `like`: the model on meta, in the run's dtypes; None: it is made from `model`.

    The stage's parameters and buffers are the model's own tensors, not copies, so that the stage trains the model. The
    parameters of other stages become `RemoteParameter`s in the stage; `model` itself stays as it is."""
    like, contents = like or shapes_of(model, seed=0).module, cut.contents(index)
    kept = {id(model.get_parameter(name)) for name, stages in cut.holders.items() if index in stages}
    module = copy_modules(model, tensors={tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    pieces = {name: module.get_submodule(name) for name in contents.modules}
    state = StageForwardState(cut, index=index, modules=[pieces[name] for name in contents.modules])
    _release(module, "_parameters", kept, like=like)
    here = contents.modules[contents.start : contents.stop]
    kept |= {id(buffer) for name in here for buffer in module.get_submodule(name).buffers()}  # pieces may share some
    for name, piece in pieces.items():
        if name in contents.split_blocks:
            piece.forward = partial(_split_block_forward, piece, state)
            continue
        if name not in here:
            _release(piece, "_buffers", kept, like=like.get_submodule(name), prefix=name)
        piece.forward = PieceForward(piece, state=state)
    receives = cut.sends[index - 1] if index else ()
    return Stage(module, index=index, count=cut.stages, state=state, receives=receives)


def _release(module: nn.Module, table: str, kept: set[int], *, like: nn.Module, prefix: str = "") -> None:
    """Replace parameters or buffers (`table`) of the module at `prefix` by `RemoteParameter`s, except the `kept` ids.

    A model can still read the dtype or shape of a released tensor; computing with it is an error."""
    for (path, owner), bare_owner in zip(module.named_modules(prefix=prefix), like.modules(), strict=True):
        for name, bare in vars(bare_owner)[table].items():
            tensor = vars(owner)[table].get(name)
            if tensor is not None and bare is not None and id(tensor) not in kept:
                del vars(owner)[table][name]
                setattr(owner, name, RemoteParameter.named(f"{path}.{name}" if path else name, like=bare))
