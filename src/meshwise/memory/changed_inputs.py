"""Restore the objects that a block receives and changes, while its forward is repeated.

Trees of tensors are made anew for every run of a block. An object among the inputs is the same one each time, and a
forward may change it. For example a decoder of transformers writes its keys and values into the cache that it receives.
A repeated forward would find them there, and append them once more. So during the repetition the object has the content
from before the first forward, and afterwards its present content again.

A tensor that is written to in place is not restored. A block that computes other values for that reason is detected by
what it saves.
"""

import contextlib
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

Container: TypeAlias = dict[Any, Any] | list[Any]
"""A list, a mapping, or the attributes of an object."""

_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, int, float, complex, str, bytes, type(None))


class BlockInputs:
    """Containers reachable from the arguments of a block, with their content before its forward."""

    def __init__(self, *arguments: Any) -> None:
        self._before = [(one, _copied(one)) for one in _reached(arguments)]

    def ran(self) -> None:
        """End the first forward: containers that it did not change need no copy."""
        self._before = [(one, before) for one, before in self._before if _contents(one) != _contents(before)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Give the containers their content from before the first forward inside the block."""
        now = [(one, _copied(one)) for one, _ in self._before]
        try:
            _put(self._before)
            yield
        finally:
            _put(now)


def _reached(arguments: tuple[Any, ...]) -> Iterator[Container]:
    """Yield each container once."""
    seen: set[int] = set()
    open_ = [*arguments]
    while open_:
        item = open_.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict | list):
            yield item
        if isinstance(item, dict | list | tuple):
            values = item.values() if isinstance(item, dict) else item
            open_ += (value for value in values if not isinstance(value, _CLOSED))
        elif isinstance(attributes := getattr(item, "__dict__", None), dict):
            open_.append(attributes)


def _copied(container: Container) -> Container:
    """Return a shallow copy of a container without calling its class's own `copy`, which may do more."""
    return dict(container) if isinstance(container, dict) else list(container)


def _contents(container: Container) -> list[int]:
    """Return the identities of what a container holds."""
    return [id(one) for one in ([*container, *container.values()] if isinstance(container, dict) else container)]


def _put(contents: list[tuple[Container, Container]]) -> None:
    """Restore the content of each container."""
    for container, content in contents:
        container.clear()
        if isinstance(container, dict):
            container.update(content)
        else:
            container.extend(content)
