"""Batches as trees of tensors: map a function over the tensors, count the rows, take a part of the rows.

A batch is the value that the user's dataset yields: a tensor, or a mapping, list, tuple or dataclass of batches. Dim 0
of every tensor in a batch counts the samples, also called rows. torch's own tree library (`torch.utils._pytree`) is
private, and every dataclass has to be registered there globally."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of the tree with `fn(tensor)` in place of every tensor.

    Mappings, lists, tuples, named tuples and dataclasses are copied. Every other value is kept as it is."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, list | tuple):
        items = [map_tensors(fn, value) for value in tree]
        return type(tree)(*items) if getattr(tree, "_fields", None) is not None else type(tree)(items)
    if type(tree) is not dict and dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        return dataclasses.replace(tree, **{name: map_tensors(fn, part) for name, part in parts.items()})
    if type(tree) is dict or isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree, in the order of its dataclass fields, keys and items."""
    rest = [tree]
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            rest += item[::-1]
        elif type(item) in _PLAIN:
            continue
        elif type(item) is not dict and dataclasses.is_dataclass(item) and not isinstance(item, type):
            # a configuration of transformers may refuse to have a field read by getattr
            rest += [object.__getattribute__(item, field.name) for field in dataclasses.fields(item)][::-1]
        elif type(item) is dict or isinstance(item, Mapping):
            rest += [*item.values()][::-1]


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of most values without tensors. Skipping them saves time: dispatch modes search every operation's arguments."""


def storage_bytes(tree: Any) -> int:
    """Return the bytes of the storages of a tree's tensors, each storage counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors(tree)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def all_tensors(value: Any) -> Iterator[Tensor]:
    """Yield each tensor of a tree and of the attributes of its objects once, unordered; modules are left out."""
    return (item for item in reachable(value) if isinstance(item, Tensor))


def reachable(value: Any) -> Iterator[Any]:
    """Yield a value and all objects in its containers and attributes once, unordered; modules are left out."""
    seen = set()
    open_ = [value]
    while open_:
        item = open_.pop()
        if id(item) in seen or isinstance(item, _LEFT_OUT):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, Tensor):
            continue
        if isinstance(item, Mapping):
            open_ += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            open_ += item
        if dataclasses.is_dataclass(item):
            open_ += [object.__getattribute__(item, field.name) for field in dataclasses.fields(item)]
        if isinstance(attributes := getattr(item, "__dict__", None), dict):
            open_.append(attributes)


_LEFT_OUT = (nn.Module, type, FunctionType, MethodType, ModuleType, int, float, complex, str, bytes, type(None))
"""Types of objects that hold no tensors of a batch."""


def row_count(tree: Any) -> int:
    """Return the number of samples of a batch: the size of dim 0, the same in all its tensors.

    Raises ValueError when the batch has no tensor, a tensor without dims, or tensors with different sizes of dim 0."""
    shapes = [tuple(tensor.shape) for tensor in tensors(tree)]
    if not shapes:
        raise ValueError(f"the batch, a {type(tree).__name__}, holds no tensor; a batch is a tree of tensors")
    if any(len(shape) == 0 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"dim 0 of every tensor of a batch counts its samples, so transpose others; shapes: {shapes}")
    return shapes[0][0]


def take_rows(tree: Any, *, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` (excluded) of a batch, as views; an empty range gives an empty batch.

    Raises ValueError when the batch does not have these samples."""
    rows = row_count(tree)
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"no rows {start} to {stop} in a batch of {rows} rows")
    return map_tensors(lambda tensor: tensor.narrow(0, start, stop - start), tree)
