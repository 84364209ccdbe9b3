"""Initialize a model's parameters one at a time, so that no rank holds the whole model.

`build_with_values` takes a model that exists, or a function that builds a model. In the second case, the model stays on
the meta device. Its parameters are computed one by one (`ParameterSource.full`), and each rank keeps its part.

The same seed gives the same values, bit for bit, under every plan, on every rank and in every order. They differ from
the values that the function would draw from torch's global generator, which is neither read nor changed. A generator
that the function passes to torch is not used either. Random numbers of numpy and Python are not replaced. Elements that
the constructor leaves uninitialized are NaN, or 0 in tensors of integers."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.world import Axes, World
from meshwise.model.construction_record import ConstructionRecord, recording
from meshwise.model.module_copy import carry_hooks, copy_modules
from meshwise.model.parameter_table import ParameterRow, check_readable
from meshwise.plan import Plan, PlanError


class ParameterSource:
    """Source of the values of a model's parameters and buffers; the values exist, or are computed on demand."""

    def __init__(self, module: nn.Module, *, record: ConstructionRecord | None, shapes_only: bool = False) -> None:
        """`record`: computes the values of a model on meta; None if they exist. `shapes_only`: there are no values."""
        self.module = module
        self.deferred = record is not None or shapes_only
        """True if the parameters of `module` are on the meta device, and get their values later."""
        self._record = record
        self._shapes_only = shapes_only
        self._staging: Tensor | None = None
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in _named_tensors(module):
            if tensor.is_meta and not shapes_only and not (record and record.knows(tensor)):
                raise ValueError(
                    f"{name} is on the meta device and has no values; pass the function that builds "
                    f"{type(module).__name__} instead of the module, or give the module its values first"
                )
            self._tensors[name] = tensor.detach()
            if record and tensor.is_meta:
                record.name_draws([tensor], name=name.replace("_orig_mod.", ""))

    def full(self, name: str) -> Tensor:
        """Return the full tensor of a parameter or buffer, by any of its names.

        With a record it is computed on the CPU; with `shapes_only` it is on meta; else it is the model's own tensor."""
        wanted = self._tensors[name]
        if self._shapes_only:
            return wanted.to("meta")
        if self._record is None or not wanted.is_meta:
            return wanted
        values = self._record.values([wanted])[0]
        return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values

    def broadcast_full(self, name: str, *, world: World, axes: Axes | None = None) -> Tensor:
        """Return the full tensor, with equal values on all ranks: a collective along `axes` (default: all axes).

        If every rank holds the model, the first rank's values are broadcast; a deferred model computes equal values.
        Every rank along `axes` must ask for the same names in the same order. The tensor is valid until the next call,
        because all calls use one buffer: freed copies of single parameters would leave holes in the heap."""
        value = self.full(name)
        if self.deferred or world.size == 1:
            return value
        if self._staging is None:
            largest = max(tensor.nbytes for tensor in self._tensors.values())
            self._staging = torch.empty(largest, dtype=torch.uint8, device=world.device)
        staged = self._staging[: value.nbytes].view(value.dtype).view(value.shape)
        staged.copy_(value)
        world.broadcast(staged, axes=world.mesh.names if axes is None else axes).wait()
        return staged

    def for_module(self, module: nn.Module) -> "ParameterSource":
        """Return this source for another module on meta: a part of the model, with the model's parameter names."""
        part = copy.copy(self)
        part.module, part.deferred = module, True
        return part

    def fill_buffers(self) -> None:
        """Compute buffers and tensors in plain attributes that are on meta, and replace them by the CPU tensors."""
        made: dict[int, Tensor] = {}
        for path, owner in self.module.named_modules():
            trees = {**_plain_attributes(owner), **dict(owner.named_buffers(recurse=False, remove_duplicate=False))}
            for key, tree in trees.items():
                names = {id(tensor): name for name, tensor in _entries(_join(path, key), tree) if tensor.is_meta}
                for identity, name in names.items():
                    made.setdefault(identity, self.full(name))
                if names:
                    setattr(owner, key, map_tensors(lambda t: made.get(id(t), t), tree))


def build_with_values(model: nn.Module | Callable[[], nn.Module], *, seed: int) -> ParameterSource:
    """Return the source of the values of a module, or of the module that a function builds on the meta device.

    The function is called once, on meta tensors, and its operations are recorded. Draws follow from `seed`. Raises
    ValueError for a module on the meta device, a result that is no module, and draws that cannot be repeated."""
    if isinstance(model, nn.Module):
        check_readable(model)
        return ParameterSource(model, record=None)
    with recording(seed=seed) as record:
        module = model()
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model function returned {type(module).__name__}; it must return the nn.Module")  # noqa: TRY004
    check_readable(module)
    _refuse_unregistered(module)
    return ParameterSource(module, record=record)


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return True for a parameter whose class is of bitsandbytes or torchao."""
    held = (parameter.data, parameter)
    return any(type(tensor).__module__.startswith(("bitsandbytes.", "torchao.")) for tensor in held)


def set_quantized_aside(module: nn.Module, *, plan: Plan) -> Callable[[], None]:
    """Make the quantized parameters of bitsandbytes and torchao plain attributes; return a function that undoes this.

    Every rank keeps them whole, because their bytes can be neither split nor summed, and they are not trained. Raises
    PlanError if the model has quantized parameters and the plan splits the model by tp, ep or pp."""
    found = [
        (path, part, key, parameter)
        for path, part in module.named_modules()
        for key, parameter in part.named_parameters(recurse=False)
        if is_quantized(parameter)
    ]
    if found and max(plan.tp, plan.ep, plan.pp) > 1:
        name = _join(found[0][0], found[0][2])
        raise PlanError(f"'{plan}' would split the quantized {name}. Nearest that works: 'tp=1 ep=1 pp=1'")
    for _, part, key, parameter in found:
        delattr(part, key)
        vars(part)[key] = parameter

    def undo() -> None:
        for _, part, key, parameter in found:
            del vars(part)[key]
            part.register_parameter(key, parameter)

    return undo


def shapes_of(model: nn.Module | Callable[[], nn.Module], *, seed: int) -> ParameterSource:
    """Return a source without values, whose `module` is a copy of the model (or the function's model) on meta.

    A given module is left unchanged. Raises ValueError as `build_with_values` does."""
    if isinstance(model, nn.Module):
        check_readable(model)
        bare = {tensor: tensor.detach().to("meta") for _, tensor in _named_tensors(model)}
        for one in [one for one in bare if isinstance(one, nn.Parameter)]:
            bare[one] = nn.Parameter(bare[one], requires_grad=one.requires_grad)
        module = copy_modules(model, tensors=bare)
    else:
        module = build_with_values(model, seed=seed).module
    return ParameterSource(module, record=None, shapes_only=True)


def install(module: nn.Module, *, row: ParameterRow, tensor: Tensor) -> nn.Parameter:
    """Replace a parameter under all its names by a new parameter over the memory of `tensor`, and return it.

    A meta parameter cannot get memory on another device by `.data`. The new parameter keeps `requires_grad`, hooks and
    Python attributes of the old one. `tensor` may be only this rank's part of the parameter."""
    old = module.get_parameter(row.name)
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    carry_hooks(old, to=new)
    for name in (row.name, *row.aliases):
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, new)
    return new


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, then tensors in plain attributes, each under all its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, owner in module.named_modules():
        for key, tree in _plain_attributes(owner).items():
            yield from _entries(_join(path, key), tree)


def _refuse_unregistered(module: nn.Module) -> None:
    """Raise ValueError for modules in plain lists and dicts, whose parameters torch does not register."""
    known, every = {id(parameter) for parameter in module.parameters()}, vars(nn.Module())
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            parts = [part for part in entries if isinstance(part, nn.Module)] if key not in every else []
            if any(id(parameter) not in known for part in parts for parameter in part.parameters()):
                raise ValueError(
                    f"{_join(path, key)} holds modules that torch does not register there, so their parameters get no "
                    "values and no training; put the modules into an nn.ModuleList or nn.ModuleDict"
                )


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that hold tensors but are neither parameters nor buffers."""
    every = vars(nn.Module())
    own = {key: value for key, value in vars(module).items() if key not in every}
    return {key: value for key, value in own.items() if any(True for _ in _entries(key, value))}


def _entries(name: str, tree: object) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for an attribute's tensors that are no parameters: `name`, or `name[i]` in a container."""
    for index, tensor in enumerate(tensors(tree)):
        if not isinstance(tensor, nn.Parameter):
            yield name if tensor is tree else f"{name}[{index}]", tensor


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
