"""Whether a module's input goes to some of its children and nowhere else.

Three linears that read one tensor may gather it once, at the entry of the module around them, if that tensor goes to
nothing but them: what else reads it (a norm, a residual) needs the part that the rank has. The source of the forward
tells. Where it does not, every linear gathers for itself, which costs traffic and nothing else, unless the forward asks
its input for sizes that those of the gathered one should be.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

from torch import nn

from meshwise.model.reads import source_of

_RESHAPING = frozenset({"view", "reshape", "split", "unflatten"})
_OF_ITS_SHAPE = frozenset({"shape", "size", "dim", "ndim", "dtype", "device"})


def only_read_by(module: nn.Module, *, children: Sequence[str]) -> bool:
    """Whether the first argument of a module's forward is read by each of the children called by these names, and
    besides only asked for its sizes.
    """
    definition = _forward(module)
    if definition is None:
        return False
    itself, given = (argument.arg for argument in definition.args.args[:2])
    readers, harmless = set(), _asked_for_sizes(definition)
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Attribute):
            called = isinstance(node.func.value, ast.Name) and node.func.value.id == itself
            if called and node.func.attr in children and _is_named(node.args[0], given):
                readers.add(node.func.attr)
                harmless.add(id(node.args[0]))
    return readers == set(children) and all(
        id(node) in harmless for node in ast.walk(definition) if _is_named(node, given)
    )


def sizes_unused(module: nn.Module) -> bool:
    """Whether a module's forward is known not to ask its first argument for its sizes."""
    definition = _forward(module)
    if definition is None:
        return False
    given, asked = definition.args.args[1].arg, _asked_for_sizes(definition)
    return not any(id(node) in asked for node in ast.walk(definition) if _is_named(node, given))


def splits_by_width(module: nn.Module) -> bool:
    """Whether a module's forward takes the number of features from its first argument, and uses it only to view or
    split what its matrices return, or divides it by a number of heads, as many do.

        B, T, C = x.size()        q, k, v = self.qkv(x).split(C, dim=2)        q.view(B, T, self.heads, C // self.heads)
    """
    definition = _forward(module)
    if definition is None:
        return False
    given = definition.args.args[1].arg
    names = {
        node.targets[0].elts[-1].id
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.targets[0].elts[-1], ast.Name)
        and _is_sizes_of(node.value, given)
    }
    harmless: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPING:
            harmless |= {id(argument) for argument in node.args}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            harmless.add(id(node.left))
    uses = [
        n for n in ast.walk(definition) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)
    ]
    return bool(uses) and all(id(node) in harmless for node in uses)


def _is_sizes_of(node: ast.expr, name: str) -> bool:
    """Whether an expression is `name.shape` or `name.size()`."""
    if isinstance(node, ast.Call) and not node.args:
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "size") and _is_named(node.value, name)


def _forward(module: nn.Module) -> ast.FunctionDef | None:
    """The source of a module's forward, when it is there and takes an argument."""
    try:
        definition = source_of(inspect.unwrap(type(module).forward)).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) and len(definition.args.args) > 1 else None


def _asked_for_sizes(definition: ast.FunctionDef) -> set[int]:
    attributes = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    return {id(node.value) for node in attributes if node.attr in _OF_ITS_SHAPE}


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
