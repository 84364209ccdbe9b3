"""A stage, made from a model and its cut."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor, fx, nn

from meshwise.model.deferred_init import build_without_values
from meshwise.model.module_copy import copied
from meshwise.pipeline.cut.block_entry import CALL, module_at
from meshwise.pipeline.cut.fx_trace import part_of
from meshwise.pipeline.cut.model_cut import ModelCut, StageContents
from meshwise.pipeline.run.remote_parameter import RemoteParameter
from meshwise.pipeline.run.stage import OpenedBlock, PieceForward, Stage, StageRoute, StageRun


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values."""
    return copied(
        model, tensors={tensor: build_without_values(tensor) for tensor in (*model.parameters(), *model.buffers())}
    )


def make_stage(model: nn.Module, *, cut: ModelCut, index: int, like: nn.Module | None = None) -> Stage:
    """Stage `index` of a model that was cut. `like`: the model without values, in the dtypes that it is to run in.

    Its parameters and buffers are the model's own tensors, not copies (but for `cut.own`): what the stage trains is the
    model. The parameters of other stages are released; their memory is free unless another object holds the model.
    """
    crossing = StageRun(cut.crossing[index] if index + 1 < cut.stages else (), changed=cut.changed, alike=cut.alike)
    crossing.differentiates = cut.differentiates
    module = (
        _blocks(model, cut, index, crossing, like or bare(model))
        if cut.trace is None
        else _traced(model, cut, index, crossing)
    )
    receives = cut.crossing[index - 1] if index else ()
    return Stage(module, index=index, count=cut.stages, crossing=crossing, receives=receives)


def _blocks(model: nn.Module, cut: ModelCut, index: int, crossing: StageRun, like: nn.Module) -> nn.Module:
    """Return the model, with the pieces of other stages without parameters."""
    met = cut.met(index)
    held = {id(model.get_parameter(name)) for name, stages in cut.holders.items() if index in stages}
    own = {model.get_buffer(name) for name in cut.own}
    tensors = {*model.parameters(), *model.buffers()} - own
    module = copied(model, tensors=dict(zip(tensors, tensors, strict=True)))
    pieces = {name: module_at(module, name=name) for name in met.modules}
    modules = [pieces[name] for name in met.modules]
    route = StageRoute(met.keys, modules=modules, start=met.start, stop=met.stop)
    for (path, owner), bare_owner in zip(module.named_modules(), like.modules(), strict=True):
        _let_go(owner, owner._parameters, held, bare_owner._parameters, path=path)
    for name, piece in pieces.items():
        if name in met.opened:
            attention = pieces.get(f"{name}.{CALL}")
            piece.forward = OpenedBlock(piece, route=route, crossing=crossing, attention=attention)
            continue
        if name not in met.modules[met.start : met.stop]:
            for (path, owner), bare_owner in zip(
                piece.named_modules(prefix=name), module_at(like, name=name).modules(), strict=True
            ):
                _let_go(owner, owner._buffers, held, bare_owner._buffers, path=path)
        shadow = module_at(like, name=name) if _is_asked(name, met, cut) else None
        piece.forward = PieceForward(piece, shadow=shadow, route=route, crossing=crossing)
    return module


def _is_asked(name: str, met: StageContents, cut: ModelCut) -> bool:
    """Return whether a piece may be asked for the shapes of its output.

    Its gradient is never asked for where the stage computes it, nor where its shapes equal the input's.
    """
    calls = enumerate(zip(met.keys, met.modules, strict=True))
    elsewhere = [key for at, (key, module) in calls if module == name and not met.start <= at < met.stop]
    return not cut.alike.issuperset(elsewhere)


def _let_go(
    owner: nn.Module, tensors: MutableMapping[str, Any], held: set[int], like: Mapping[str, Any], *, path: str
) -> None:
    """Forget the parameters, or the buffers, of the module at `path` that are not held here.

    What stays under the name is for a model that asks for a dtype or a shape; to compute with it is an error.
    """
    for name, tensor in list(tensors.items()):
        bare = like[name]
        if tensor is not None and bare is not None and id(tensor) not in held:
            del tensors[name]
            setattr(owner, name, RemoteParameter.named(f"{path}.{name}" if path else name, like=bare))


def _traced(model: nn.Module, cut: ModelCut, index: int, crossing: StageRun) -> nn.Module:
    """Return the stage's part of the model's operations."""
    assert cut.trace is not None
    start, stop = cut.bounds[index : index + 2]
    last = index + 1 == cut.stages
    part = part_of(cut.trace.graph, keys=cut.keys[start:stop], sends=crossing.sends, last=last)
    beside: dict[str, Any] = {"_received": _Received(crossing), "_leaves": _Leaves(crossing)}
    names = {str(node.target): None for node in part.nodes if node.op in ("call_module", "get_attr")}
    model = copied(model, tensors={tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    held = {name: beside[name] if name in beside else cut.trace.tensor(name, model=model) for name in names}
    module = fx.GraphModule(held, part)
    module.training = model.training
    _keep_state(module, model=model, cut=cut, index=index)
    return module


def _keep_state(module: nn.Module, *, model: nn.Module, cut: ModelCut, index: int) -> None:
    """Give a traced stage the state that a stage of pieces would hold. That includes parameters and buffers that no
    operation reads and fx does not know (the buffers on the last stage). State that fx adds is removed: fx makes a
    buffer of every tensor that an operation reads.
    """
    persistent = {
        f"{path}.{key}" if path else key: buffer
        for path, owner in model.named_modules(remove_duplicate=False)
        for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        if key not in owner._non_persistent_buffers_set
    }
    for path, owner in module.named_modules():
        for key in owner._buffers:
            if (f"{path}.{key}" if path else key) not in persistent:
                owner._non_persistent_buffers_set.add(key)
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, stages in cut.holders.items():
        if index in stages and name not in own:
            _put(module, name, model.get_parameter(name))
    if index + 1 == cut.stages:
        assert cut.trace is not None
        for name, buffer in persistent.items():
            if not cut.trace.reads(name):
                _put(module, name, buffer)
    _sort(module, like=model)


def _sort(module: nn.Module, *, like: nn.Module) -> None:
    """Sort a module's state into the model's order, which decides the first of a parameter's names."""
    for name, child in like._modules.items():
        found = module._modules.pop(name, None)
        if found is not None and child is not None:
            module._modules[name] = found
            if found is not child:
                _sort(found, like=child)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer under a name of the model's, in modules that only hold it."""
    *path, key = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(key, tensor)
    else:
        module.register_buffer(key, tensor)


class _Received(nn.Module):
    """In a trace: a value from an earlier stage."""

    def __init__(self, crossing: StageRun) -> None:
        super().__init__()
        self._crossing = crossing

    def forward(self, key: str) -> Any:
        """Return the value of the operation of this name."""
        return self._crossing.received[key]


class _Leaves(nn.Module):
    """In a trace: the end of a stage that is not the last."""

    def __init__(self, crossing: StageRun) -> None:
        super().__init__()
        self._crossing = crossing

    def forward(self, values: dict[str, Any]) -> None:
        """Send the values, and leave the model."""
        for key, value in values.items():
            self._crossing.keep(key, value=value)
        self._crossing.leave()
