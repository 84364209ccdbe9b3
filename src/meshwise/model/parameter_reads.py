"""Find the parameters of child modules that a module's forward reads without calling the child.

A unit is gathered when one of its modules is called. But a forward can also read the weight of a child directly:

    return functional.linear(x, self.embedding.weight)          # a head tied by use, not by registration

Then the child is never called, and its weight would not be gathered. torch's own MultiheadAttention reads `out_proj`
like this. No hook sees the read of an attribute, and parameters must stay plain parameters. So the source code of
`forward`, and of the methods that it calls on `self`, is searched for dotted names that lead from `self` to a
child's parameter. The search misses a child under another name, and a function without source code. For these the user
names the module in `units`."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

_NOT_VALUES = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad"})


def read_from_children(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of child modules that `module.forward` reads directly, sorted by dotted name."""
    found: dict[nn.Parameter, None] = {}
    for path in sorted(dotted_names(type(module))):
        owner: nn.Module | None = module
        for depth, name in enumerate(path):
            if owner is None:
                break
            parameter = owner._parameters.get(name)
            if parameter is not None and depth > 0 and not _NOT_VALUES.intersection(path[depth + 1 : depth + 2]):
                found[parameter] = None
            owner = owner._modules.get(name)
    return list(found)


def dotted_names(kind: type[nn.Module]) -> set[tuple[str, ...]]:
    """Return the names `self.a.b` in `forward`, and in the methods that it names on `self`, as ("a", "b")."""
    found: set[tuple[str, ...]] = set()
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = waiting.pop()
        if method not in seen:
            seen.add(method)
            names = {name for function in _definitions(kind, method) for name in _names_in(function)}
            waiting += [name[0] for name in names if len(name) == 1]
            found |= names
    return found


def _definitions(kind: type[nn.Module], method: str) -> Iterator[Any]:
    """Yield a method's definitions in a class and its bases below nn.Module, because `super` may call a base's."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        function = inspect.unwrap(vars(base)[method]) if callable(vars(base).get(method)) else None
        if inspect.isfunction(function):
            yield function


@lru_cache(256)
def _names_in(function: Any) -> frozenset[tuple[str, ...]]:
    try:
        definition = source_of(function).body[0]
    except (OSError, SyntaxError):  # made at run time, or by a lambda inside an expression
        return frozenset()
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return frozenset()
    itself = definition.args.args[0].arg
    inner = {id(node.value) for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    paths = (_path(node) for node in ast.walk(definition) if id(node) not in inner)
    return frozenset(path[1:] for path in paths if path[:1] == (itself,) and len(path) > 1)


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return the names of an expression `a.b.c` as ("a", "b", "c"), or () for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


@lru_cache(256)
def source_of(function: Any) -> ast.Module:
    """Return the syntax tree of a function's source code. The tree is cached: do not change it.

    Raises OSError for a function without source code, and SyntaxError for a function inside a larger expression.
    CPython 3.11 counts the depth of all threads' syntax trees together, so parsing in two threads may fail
    (python/cpython issue 106905). Then parsing is tried again."""
    while True:
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
