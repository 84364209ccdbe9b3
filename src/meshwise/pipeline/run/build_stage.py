"""Make one pipeline stage from a model and its cut: pieces of other stages lose their parameters and do not compute."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn

from meshwise.model.deferred_init import without_values
from meshwise.model.module_copy import copy_modules
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.run.remote_parameter import RemoteParameter
from meshwise.pipeline.run.stage import PieceForward, SplitBlockForward, Stage, StageForwardState, StageRoute


def model_without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    own = (*model.parameters(), *model.buffers())
    return copy_modules(model, tensors={tensor: without_values(tensor) for tensor in own})


def make_stage(model: nn.Module, *, cut: ModelCut, index: int, like: nn.Module | None = None) -> Stage:
    """Return stage `index` of a model. `like`: the model on meta, in the run's dtypes; None: it is made from `model`.

    The stage's parameters and buffers are the model's own tensors, not copies, so that the stage trains the model. The
    parameters of other stages become `RemoteParameter`s in the stage; `model` itself stays as it is."""
    state = StageForwardState(
        cut.sends[index] if index + 1 < cut.stages else (), changed=cut.changed, same_shape=cut.same_shape
    )
    module = _blocks(model, cut, index, state, like or model_without_values(model))
    receives = cut.sends[index - 1] if index else ()
    return Stage(module, index=index, count=cut.stages, state=state, receives=receives)


def _blocks(model: nn.Module, cut: ModelCut, index: int, state: StageForwardState, like: nn.Module) -> nn.Module:
    """Return a copy of the model in which every piece has a stage's forward; other stages' tensors are released."""
    contents = cut.contents(index)
    kept = {id(model.get_parameter(name)) for name, stages in cut.holders.items() if index in stages}
    module = copy_modules(model, tensors={tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    pieces = {name: module.get_submodule(name) for name in contents.modules}
    modules = [pieces[name] for name in contents.modules]
    route = StageRoute(contents.keys, modules=modules, start=contents.start, stop=contents.stop)
    for (path, owner), bare_owner in zip(module.named_modules(), like.modules(), strict=True):
        _release(owner, owner._parameters, kept, bare_owner._parameters, path=path)
    for name, piece in pieces.items():
        if name in contents.split_blocks:
            piece.forward = SplitBlockForward(piece, route=route, state=state)
            continue
        if name not in contents.modules[contents.start : contents.stop]:
            for (path, owner), bare_owner in zip(
                piece.named_modules(prefix=name), like.get_submodule(name).modules(), strict=True
            ):
                _release(owner, owner._buffers, kept, bare_owner._buffers, path=path)
        piece.forward = PieceForward(piece, shadow=like.get_submodule(name), route=route, state=state)
    return module


def _release(
    owner: nn.Module, tensors: MutableMapping[str, Any], kept: set[int], like: Mapping[str, Any], *, path: str
) -> None:
    """Replace parameters or buffers (`tensors`) of the module at `path` by `RemoteParameter`s, except the `kept` ids.

    A model can still read the dtype or shape of a released tensor; computing with it is an error."""
    for name, tensor in list(tensors.items()):
        bare = like[name]
        if tensor is not None and bare is not None and id(tensor) not in kept:
            del tensors[name]
            setattr(owner, name, RemoteParameter.named(f"{path}.{name}" if path else name, like=bare))
