"""Initialize a model's parameters one at a time, so that no rank holds the whole model.

`build_with_values` takes a model that exists, or a function that builds one. The function's model stays on meta
tensors. Its parameters are computed one by one (`ParameterSource.full`), and each rank keeps its part. The same seed
gives the same values, bit for bit, under every plan, on every rank and in every order. They differ from the values that
the function alone would draw from torch's global generator, which stays untouched. A generator that the function itself
passes to torch is replaced as well. Random numbers of numpy or of Python are left alone.

Elements that the constructor never writes are an error that names the tensor.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.world import Axes, World
from meshwise.model.construction_record import recording
from meshwise.model.construction_replay import ConstructionRecord
from meshwise.model.module_copy import carry_hooks, copy_modules
from meshwise.model.parameter_table import ParameterRow, check_readable


class ParameterSource:
    """Source of the values of a model's tensors."""

    def __init__(self, module: nn.Module, *, record: ConstructionRecord | None, shapes_only: bool = False) -> None:
        """`record`: computes the values of a deferred model. `shapes_only`: `full` returns meta tensors."""
        self.module = module
        self.deferred = record is not None or shapes_only
        """Whether the parameters of `module` are on the meta device and still need their values."""
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
                record.name_draws([tensor], name=name)

    def full(self, name: str) -> Tensor:
        """Return the full values of a parameter or buffer, under any of its names.

        A deferred model computes them, on the CPU; another model returns its data, not a copy. Raises ValueError for
        elements that the constructor never initialises.
        """
        wanted = self._tensors[name]
        if self._shapes_only:
            return wanted.to("meta")
        if self._record is None or not wanted.is_meta:
            return wanted
        values = self._record.values([wanted])[0]
        if unwritten := self._record.unwritten(wanted, values=values):
            raise ValueError(
                f"{name}: {unwritten} of {values.numel()} elements are never initialised; write all of them in the "
                f"constructor of {type(self.module).__name__}, for example with an initialiser of torch.nn.init"
            )
        return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values

    def broadcast_full(self, name: str, *, world: World, axes: Axes | None = None) -> Tensor:
        """Return the full values; if every rank holds the model, the first rank's, sent along `axes` (default: all).

        Every rank along `axes` asks for the same names in the same order.

        The values are valid until the next call. All calls use one piece of memory: freed copies of single parameters
        would leave the process with holes of the size of the model's blocks.
        """
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
        """Return the source for `module`, which has some of the parameters under the same names, on the meta device."""
        part = copy.copy(self)
        part.module, part.deferred = module, True
        return part

    def fill_buffers(self) -> None:
        """Compute the buffers and the tensors in plain attributes, and put them into the module, on the CPU.

        Raises ValueError as `full` does.
        """
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
    """Return the source of a module that exists, or of the module that a function builds, on the meta device.

    The function is called once; its tensor operations are recorded and run on meta tensors. Raises ValueError for a
    module on the meta device, for a function that does not return a module, and for random draws that cannot be
    repeated.
    """
    if isinstance(model, nn.Module):
        check_readable(model)
        return ParameterSource(model, record=None)
    with recording(seed=seed) as record:
        module = model()
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model function returned {type(module).__name__}; it must return the nn.Module")  # noqa: TRY004
    check_readable(module)
    for name, _ in _unregistered(module):
        raise ValueError(
            f"{name} holds modules that torch does not register there, so their parameters get no values and are not "
            "trained; put them into an nn.ModuleList or nn.ModuleDict"
        )
    return ParameterSource(module, record=record)


def shapes_of(model: nn.Module | Callable[[], nn.Module], *, seed: int) -> ParameterSource:
    """Return a model (or the one that a function builds) on the meta device, whose values are never needed.

    A module is left unchanged. Raises ValueError as `build_with_values` does.
    """
    if isinstance(model, nn.Module):
        check_readable(model)
        every = [model, *(part for _, part in _unregistered(model))]
        tensors_ = (tensor for part in every for _, tensor in _named_tensors(part))
        module = copy_modules(model, tensors={tensor: without_values(tensor) for tensor in tensors_})
    else:
        module = build_with_values(model, seed=seed).module
    return ParameterSource(module, record=None, shapes_only=True)


def without_values(tensor: Tensor) -> Tensor:
    """Return the tensor on the meta device; a parameter stays a parameter."""
    bare = tensor.detach().to("meta")
    return nn.Parameter(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def install(module: nn.Module, *, row: ParameterRow, tensor: Tensor) -> nn.Parameter:
    """Put `tensor` in place of a parameter under all its names, and return the new parameter, which shares its memory.

    A meta parameter cannot get memory on another device through `.data`. The new one keeps `requires_grad`, the hooks
    and the model's attributes of the old one. Its shape is the shape of this rank's part.
    """
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


def _unregistered(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in plain lists and dictionaries, whose parameters torch does not count as the model's."""
    known, every = {id(parameter) for parameter in module.parameters()}, vars(nn.Module())
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            for part in entries if key not in every else ():
                if isinstance(part, nn.Module) and any(id(parameter) not in known for parameter in part.parameters()):
                    yield _join(path, key), part


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that hold tensors but are neither parameters nor buffers."""
    every = vars(nn.Module())
    own = {key: value for key, value in vars(module).items() if key not in every}
    return {key: value for key, value in own.items() if any(True for _ in _entries(key, value))}


def _entries(name: str, tree: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an attribute, parameters aside, with their names: `name`, or `name[i]` in a container."""
    for index, tensor in enumerate(tensors(tree)):
        if not isinstance(tensor, nn.Parameter):
            yield name if tensor is tree else f"{name}[{index}]", tensor


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
