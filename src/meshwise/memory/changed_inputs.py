"""The objects that a block is handed and changes, as they were when it was called.

Trees of tensors are made anew for every run of a block. An object among the inputs is the same one each time, and a
forward may change it. For example a decoder of transformers writes its keys and values into the cache that it receives.
Repeated, it would find them there, and put them in once more behind the first. So while the forward is repeated what it
changed the first time is as it was before, and afterwards as it was left.

A tensor that is written to in place stays written to; a block that computes something else for that is found out by
what it saves.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

Holder: TypeAlias = dict[Any, Any] | list[Any]
"""What can be changed: a list, a mapping, or the attributes of an object."""

_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, int, float, complex, str, bytes, type(None))


class BlockInputs:
    """Objects reachable from the arguments of a block."""

    def __init__(self, *arguments: Any) -> None:
        self._before = [(holder, _copied(holder)) for holder in _reached(arguments)]

    def ran(self) -> None:
        """Note that the first forward has run: inputs that it did not change need no copy."""
        self._before = [(holder, before) for holder, before in self._before if _is_changed(holder, before)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, all is as it was."""
        now = [(holder, _copied(holder)) for holder, _ in self._before]
        try:
            _put(self._before)
            yield
        finally:
            _put(now)


def _reached(arguments: tuple[Any, ...]) -> Iterator[Holder]:
    """Yield each holder once."""
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


def _copied(holder: Holder) -> Holder:
    """Return a shallow copy of a container without calling its class's own `copy`, which may do more."""
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _is_changed(holder: Holder, before: Holder) -> bool:
    if len(holder) != len(before):
        return True
    if isinstance(holder, dict):
        assert isinstance(before, dict)
        return any(key not in before or before[key] is not value for key, value in holder.items())
    return any(one is not other for one, other in zip(holder, before, strict=True))


def _put(contents: list[tuple[Holder, Holder]]) -> None:
    """Restore the content of each; not by its own methods, which may refuse (outputs of transformers do)."""
    for holder, content in contents:
        if isinstance(holder, dict):
            kind: Any = OrderedDict if isinstance(holder, OrderedDict) else dict
            kind.clear(holder)
            kind.update(holder, content)
        else:
            list.clear(holder)
            list.extend(holder, content)
