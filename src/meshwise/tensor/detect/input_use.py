"""Decide whether a module's input goes to some of its children and nowhere else.

Three linears that read one tensor may gather it once, at the entry of the module around them, if that tensor goes to
them alone. Any other reader (a norm, a residual) needs the part that the rank has. The source of the forward shows it.
If it does not, every linear gathers separately, which only costs traffic. A forward that reads sizes of its input is an
exception: it needs the sizes of the gathered input.
"""

import ast
import inspect
from collections.abc import Collection
from functools import lru_cache

from torch import nn

from meshwise.model.parameter_reads import source_of

_RESHAPING = frozenset({"view", "reshape", "split", "unflatten"})
_OF_ITS_SHAPE = frozenset({"shape", "size", "dim", "ndim", "dtype", "device"})


def only_read_by(module: nn.Module, *, children: Collection[str], others: Collection[str] = ()) -> bool:
    """Return whether each of these children reads the first argument of a module's forward, and nothing else does.

    The forward may ask the argument for its sizes.

        q, k, v = self.q(x), self.k(x), self.v(x)
        source = x if memory is None else memory            k, v = self.k(source), self.v(source)

    `others`: children that read such a second name (`source`), if at all; they get another tensor.
    """
    definition = _forward(module)
    if definition is None:
        return False
    itself, given = (argument.arg for argument in definition.args.args[:2])
    also, harmless = _second_names(definition, given)
    harmless |= _asked_for_sizes(definition)
    readers: dict[str, set[str]] = {given: set(), also: set()}
    for node in _nodes(definition):
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Name):
            called, name = _child_called(node.func, itself), node.args[0].id
            if name in readers and called in (*children, *others):
                readers[name].add(called)
                harmless.add(id(node.args[0]))
    read = readers[given] if others else readers[given] | readers[also]
    loads = [node for node in _nodes(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return read == set(children) and all(id(node) in harmless for node in loads if node.id in readers)


def sizes_unused(module: nn.Module) -> bool:
    """Return whether a module's forward never asks its first argument for its sizes.

    A method of the module that gets the argument may ask: then the result is False.
    """
    definition = _forward(module)
    if definition is None:
        return False
    given, asked = definition.args.args[1].arg, _asked_for_sizes(definition)
    for call in [node for node in _nodes(definition) if isinstance(node, ast.Call)]:
        called = _child_called(call.func, definition.args.args[0].arg)
        if inspect.isfunction(getattr(type(module), called, None)):
            asked |= {id(argument) for argument in (*call.args, *(word.value for word in call.keywords))}
    return not any(id(node) in asked for node in _nodes(definition) if _is_named(node, given))


def splits_by_width(module: nn.Module) -> bool:
    """Return whether a module's forward uses the number of features of its first argument only to view or split its
    matrices' results, or divides it by a number of heads.

        B, T, C = x.size()        q, k, v = self.qkv(x).split(C, dim=2)        q.view(B, T, self.heads, C // self.heads)
    """
    definition = _forward(module)
    if definition is None:
        return False
    given = definition.args.args[1].arg
    names = {
        node.targets[0].elts[-1].id
        for node in _nodes(definition)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.targets[0].elts[-1], ast.Name)
        and _is_sizes_of(node.value, given)
    }
    harmless: set[int] = set()
    for node in _nodes(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPING:
            harmless |= {id(argument) for argument in node.args}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            harmless.add(id(node.left))
    uses = [n for n in _nodes(definition) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    return bool(uses) and all(id(node) in harmless for node in uses)


def _is_sizes_of(node: ast.expr, name: str) -> bool:
    """Return whether an expression is `name.shape` or `name.size()`."""
    if isinstance(node, ast.Call) and not node.args:
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "size") and _is_named(node.value, name)


def _second_names(definition: ast.FunctionDef, given: str) -> tuple[str, set[int]]:
    """Return the variable that a forward sets to `given` or to another value, and the ids of these nodes."""
    for node in _nodes(definition):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) and isinstance(node.targets[0], ast.Name):
            either = [branch for branch in (node.value.body, node.value.orelse) if _is_named(branch, given)]
            if either:
                return node.targets[0].id, set(map(id, either))
    return "", set()


def _child_called(called: ast.expr, itself: str) -> str:
    """Return NAME of the called expression `self.NAME`, or ""."""
    return called.attr if isinstance(called, ast.Attribute) and _is_named(called.value, itself) else ""


def _forward(module: nn.Module) -> ast.FunctionDef | None:
    """Return the syntax tree of a module's forward, or None without source or arguments."""
    try:
        definition = source_of(inspect.unwrap(type(module).forward)).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) and len(definition.args.args) > 1 else None


@lru_cache(256)
def _nodes(definition: ast.FunctionDef) -> tuple[ast.AST, ...]:
    """Return all nodes of a definition, cached because a model has many modules of one class."""
    return tuple(ast.walk(definition))


def _asked_for_sizes(definition: ast.FunctionDef) -> set[int]:
    attributes = [node for node in _nodes(definition) if isinstance(node, ast.Attribute)]
    return {id(node.value) for node in attributes if node.attr in _OF_ITS_SHAPE}


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
