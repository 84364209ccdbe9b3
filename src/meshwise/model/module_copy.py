"""Copies of a model's modules, which share its tensors or have others in their place.

`copy.deepcopy` alone takes ten milliseconds for a dozen blocks, most of it for the empty dictionaries of hooks that
every module has.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor, nn

from meshwise.model.parameter_hooks import carry_hooks

_CONTAINERS = (OrderedDict, dict, set)


def copied(model: nn.Module, *, tensors: Mapping[Tensor, Tensor]) -> nn.Module:
    """Return a copy of the modules, with other tensors in place of some of the model's; the rest of the tensors are
    copied.
    """
    memo: dict[int, object] = {id(old): new for old, new in tensors.items()}
    for module in model.modules():
        held = vars(module).values()
        memo |= {id(value): type(value)() for value in held if type(value) in _CONTAINERS and not value}
        # What a hook made of parameters (a pruned matrix), and makes anew in each forward: deepcopy refuses it.
        made = (value for value in held if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach().clone() for value in made if id(value) not in memo}
    return copy.deepcopy(model, memo)


def duplicate(model: nn.Module) -> nn.Module:
    """Return a copy of the model and of all that it holds, with the hooks of its parameters, which `deepcopy` lets
    go.
    """
    made = copy.deepcopy(model)
    for old, new in zip(model.parameters(), made.parameters(), strict=True):
        carry_hooks(old, to=new)
    return made
