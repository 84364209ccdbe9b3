"""Give a module a class of its own that computes on shards: names, hooks, `isinstance` and `state_dict` stay."""

import functools
from typing import Any

from torch import nn


def set_sharded_class(module: nn.Module, *, front: type[nn.Module], sharding: Any, inside: bool = False) -> None:
    """Replace a module's class by one with the bases `front` and its own class, and set the attribute `sharding`.

    `inside`: the module's own class comes first, and its forward calls `front`'s."""
    module.__class__ = _sharded_class(type(module), front, inside)  # type: ignore[arg-type]  # a class is hashable
    module.sharding = sharding


@functools.cache
def _sharded_class(own: type, front: type, inside: bool) -> type[nn.Module]:  # noqa: FBT001
    """Return a class with the bases `front` and `own`. `inside`: `own` comes first, and its forward calls `front`'s.

    The result is cached, so that modules of one class with the same role share one class, as compilers prefer."""
    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own, front) if inside else (front, own), body)
