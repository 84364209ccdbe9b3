"""Copy a model: its modules, with chosen tensors in place of the model's, and the hooks of its parameters."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor, nn

_CONTAINERS = (OrderedDict, dict, set)


def copy_modules(model: nn.Module, *, tensors: Mapping[Tensor, Tensor]) -> nn.Module:
    """Return a copy of the model in which the keys of `tensors` are replaced by their values; copy other tensors.

    `copy.deepcopy` alone takes ten milliseconds for a dozen blocks, mostly for their empty dictionaries of hooks.
    """
    memo: dict[int, object] = {id(old): new for old, new in tensors.items()}
    for module in model.modules():
        attributes = vars(module).values()
        memo |= {id(value): type(value)() for value in attributes if type(value) in _CONTAINERS and not value}
        # A hook may compute a tensor from parameters in each forward (a pruned matrix); deepcopy refuses such tensors.
        made = (value for value in attributes if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach().clone() for value in made if id(value) not in memo}
    return copy.deepcopy(model, memo)


def copy_with_hooks(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model with the hooks of its parameters, which `deepcopy` drops."""
    made = copy.deepcopy(model)
    for old, new in zip(model.parameters(), made.parameters(), strict=True):
        carry_hooks(old, to=new)
    return made


def carry_hooks(old: nn.Parameter, *, to: nn.Parameter) -> None:
    """Let the new parameter `to`, which replaces `old`, call the hooks of `old`.

    `to` gets one hook that calls the hooks that `old` has at that time, so a hook that was removed is not called. The
    engine can add its own hooks to `to`, and two stages can share `old`.
    """

    def call_gradient_hooks(gradient: Tensor) -> Tensor:
        for hook in list((old._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def call_accumulate_hooks(parameter: Tensor) -> None:
        for hook in list((_accumulate_hooks(old) or {}).values()):
            hook(parameter)

    if not to.requires_grad:
        return
    if old._backward_hooks:
        to.register_hook(call_gradient_hooks)
    if _accumulate_hooks(old):
        to.register_post_accumulate_grad_hook(call_accumulate_hooks)


def _accumulate_hooks(parameter: nn.Parameter) -> dict[int, Callable[[Tensor], None]] | None:
    return parameter._post_accumulate_grad_hooks
