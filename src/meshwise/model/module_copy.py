"""Copy models with their hooks, refuse copies of a rank's part of a model, and give modules classes that use shards.

A module whose class is replaced (`set_sharded_class`) keeps its names, hooks, `isinstance` and `state_dict`."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, NoReturn

from torch import Tensor, nn

_CONTAINERS = (OrderedDict, dict, set)


def copy_modules(model: nn.Module, *, tensors: Mapping[Tensor, Tensor]) -> nn.Module:
    """Return a copy of the model in which the keys of `tensors` are replaced by their values; copy other tensors.

    `copy.deepcopy` alone takes ten milliseconds for a dozen blocks, mostly for their empty dictionaries of hooks."""
    memo: dict[int, object] = {id(old): new for old, new in tensors.items()}
    for module in model.modules():
        attributes = vars(module).values()
        memo |= {id(value): type(value)() for value in attributes if type(value) in _CONTAINERS and not value}
        # A hook may compute a tensor from parameters in each forward (a pruned matrix); deepcopy refuses such tensors.
        made = (value for value in attributes if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach().clone() for value in made if id(value) not in memo}
    return _deep_copy(model, memo)


def _deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return `copy.deepcopy(model, memo)`; functions in attributes of modules close over the copies of its objects.

    `deepcopy` alone leaves functions as they are, and a lambda that calls modules would call the model's own."""
    made = copy.deepcopy(model, memo)
    for old, new in zip(model.modules(), made.modules(), strict=True):
        for name, value in vars(old).items():
            # Compiled functions have attributes, and refer to the copies by themselves.
            if isinstance(value, FunctionType) and value.__closure__ and not vars(value):
                cells = (CellType(memo.get(id(cell.cell_contents), cell.cell_contents)) for cell in value.__closure__)
                made_of = value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
                vars(new)[name] = FunctionType(*made_of)
                vars(new)[name].__kwdefaults__ = value.__kwdefaults__
    return made


def copy_with_hooks(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model with the hooks of its parameters, which `deepcopy` drops."""
    made = _deep_copy(model, {})
    for old, new in zip(model.parameters(), made.parameters(), strict=True):
        carry_hooks(old, to=new)
    return made


def carry_hooks(old: nn.Parameter, *, to: nn.Parameter) -> None:
    """Let the new parameter `to`, which replaces `old`, call the hooks of `old`.

    For each kind of hook on `old`, `to` gets one hook, which calls the hooks that `old` has at that time. So a removed
    hook is not called, the engine can add its own hooks to `to`, and two stages can share `old`."""

    def call_gradient_hooks(gradient: Tensor) -> Tensor:
        for hook in list((old._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def call_accumulate_hooks(parameter: Tensor) -> None:
        for hook in list((old._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)

    if not to.requires_grad:
        return
    if old._backward_hooks:
        to.register_hook(call_gradient_hooks)
    if old._post_accumulate_grad_hooks:
        to.register_post_accumulate_grad_hook(call_accumulate_hooks)


_SAVE = (
    "state_dict() has one rank's part alone. Call trainer.state_dict() on every rank, which gives rank 0 all of it, or "
    'trainer.save_pretrained("folder") for a model of transformers or PEFT'
)
_LOAD = "load_state_dict() cannot fill them; load before parallelize, or call trainer.load(folder) on every rank"
_COPY = (
    "a copy would have one rank's part alone. Call average = trainer.average(0.999) for an average of the parameters, "
    "trainer.state_dict() for their values"
)


class PartialCopyGuard:
    """Guard that makes `state_dict`, `load_state_dict`, `deepcopy` and pickling of modules raise RuntimeError.

    torch would write or copy this rank's part without an error: NaN under zero=3, parts of matrices under tp, one stage
    under pp. `save_pretrained` and `torch.optim.swa_utils.AveragedModel` use these methods."""

    def __init__(self, modules: Iterable[nn.Module], *, plan: str) -> None:
        """`modules`: their submodules are guarded too. `plan`: for the messages."""
        self._refuses = True
        save, load, copy = (_raising(plan, what) for what in (_SAVE, _LOAD, _COPY))
        unless_names: Callable[..., None] = lambda *given: save(*given) if self._refuses else None  # noqa: E731
        # A module without parameters may be in other models too, as an activation that is a default argument.
        held = [part for whole in modules for part in whole.modules() if any(True for _ in part.parameters())]
        for module in dict.fromkeys(held):
            module.register_state_dict_pre_hook(unless_names)
            module.register_load_state_dict_pre_hook(load)
            vars(module)["__reduce_ex__"] = copy  # asked for by copy.deepcopy and pickle, before they read the module

    @contextlib.contextmanager
    def reading_names(self) -> Iterator[None]:
        """Allow `state_dict` inside the block, for a library that reads the names in it and no values."""
        self._refuses = False
        try:
            yield
        finally:
            self._refuses = True


def _raising(plan: str, what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(f"the plan '{plan}' splits the parameters of this model over the ranks, and {what}")

    return refuse


def set_sharded_class(module: nn.Module, *, front: type[nn.Module], sharding: Any, inside: bool = False) -> None:
    """Replace a module's class by one with the bases `front` and its own class, and set the attribute `sharding`.

    `inside`: the module's own class becomes the first base, and its forward calls the forward of `front`."""
    module.__class__ = _sharded_class(type(module), front, inside)  # type: ignore[arg-type]  # a class is hashable
    module.sharding = sharding


@functools.cache
def _sharded_class(own: type, front: type, inside: bool) -> type[nn.Module]:  # noqa: FBT001
    """Return a class with the bases `front` and `own`, or with `inside` in the opposite order.

    The result is cached, so that modules of one class with the same role share one class, as compilers prefer."""
    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own, front) if inside else (front, own), body)
