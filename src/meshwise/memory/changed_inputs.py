"""Restore the objects that a block receives and changes, while its forward is repeated.

A block may receive an object (a list, a dict, an instance of a class) and change it in its forward. For example, a
decoder of the transformers library writes its keys and values into the cache that it receives. A repeated forward
would find them there, and append them again. So during the repetition, the object has its content from before the
first forward; afterwards its present content is restored.

A tensor that is written to in place is not restored. If a block then computes other values, `recompute.py` detects it,
because the tensors that the block saves differ."""

import contextlib
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

Container: TypeAlias = dict[Any, Any] | list[Any]
"""A list, a dict, or the attributes of an object (its `__dict__`)."""

_PLAIN = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, int, float, complex, str, bytes, type(None))
"""Types whose content is not searched for containers."""


class BlockInputs:
    """The containers that can be reached from a block's arguments, with copies of their content before its forward."""

    def __init__(self, *arguments: Any) -> None:
        self._before = [(one, _copied(one)) for one in _reached(arguments)]

    def ran(self) -> None:
        """Drop the copies of containers that the first forward left unchanged; call it after that forward."""
        self._before = [(one, before) for one, before in self._before if _contents(one) != _contents(before)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the containers have their content from before the first forward; afterwards their present content."""
        now = [(one, _copied(one)) for one, _ in self._before]
        try:
            _put(self._before)
            yield
        finally:
            _put(now)


def _reached(arguments: tuple[Any, ...]) -> Iterator[Container]:
    """Yield each container that can be reached from the arguments, once."""
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
            open_ += (value for value in values if not isinstance(value, _PLAIN))
        elif isinstance(attributes := getattr(item, "__dict__", None), dict):
            open_.append(attributes)


def _copied(container: Container) -> Container:
    """Return a shallow copy of a container. It avoids the `copy` method of the container's class, which may do more."""
    return dict(container) if isinstance(container, dict) else list(container)


def _contents(container: Container) -> list[int]:
    """Return the `id` of every key and value of a container."""
    return [id(one) for one in ([*container, *container.values()] if isinstance(container, dict) else container)]


def _put(contents: list[tuple[Container, Container]]) -> None:
    """Restore the content of each container."""
    for container, content in contents:
        container.clear()
        if isinstance(container, dict):
            container.update(content)
        else:
            container.extend(content)
