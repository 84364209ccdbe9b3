"""Find out from the source of a module's forward which outputs of its children a child reads.

That shows the place of a matrix in a pair, and of a norm between its matrices (`read_outputs`). It proves nothing: a
trial shows if the parts that follow from it are right (`tensor/split_trial.py`)."""

import ast
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from torch import nn

from meshwise.model.parameter_units import source_of

_NUMBERS = frozenset({"bool", "int", "float", "str"})


def read_outputs(module: nn.Module) -> Mapping[str, frozenset[str]]:
    """Return, for each child that a module's forward calls, the attributes of self that its arguments come from.

    The children are in the order of their calls. Arguments of the forward besides the first count too, as "gain=",
    unless their default or annotation is a number or flag. For `self.out(self.norm(self.q(x)) * gain)`, q reads {},
    norm reads {q}, and out reads {norm, q, gain=}."""
    if type(module).forward is nn.Sequential.forward:
        names = [*module._modules]
        return {name: frozenset(names[:place]) for place, name in enumerate(names)}
    return _read_outputs(_forward(module))


@lru_cache(256)
def _read_outputs(nodes: tuple[ast.AST, ...]) -> Mapping[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    behind = {name: frozenset((f"{name}=",)) for name in _other_tensors(nodes)}

    def sources(*nodes: ast.AST) -> frozenset[str]:
        inside = [inner for node in nodes for inner in ast.walk(node)]
        named = [behind.get(inner.id, frozenset()) for inner in inside if isinstance(inner, ast.Name)]
        return frozenset(_child_called(inner) for inner in inside).union(*named) - {""}

    for node in _in_order(nodes):
        match node:
            case ast.Call(func=func, args=args, keywords=keywords) if child := _child_called(func):
                found[child] = found.get(child, frozenset()) | sources(*args, *keywords)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                behind |= dict.fromkeys(_assigned(node), sources(value))
            case ast.AugAssign(target=target, value=value):
                behind |= dict.fromkeys(_assigned(node), sources(target, value))
    return found


_Assignment: TypeAlias = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


def _in_order(nodes: Sequence[ast.AST]) -> list[_Assignment | ast.Call]:
    """Return the assignments and calls of a forward in the order of execution."""
    found = [node for node in nodes if isinstance(node, _Assignment | ast.Call)]
    # a node follows the nodes in it, and an assignment its value
    return sorted(found, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0, isinstance(n, _Assignment)))


def _assigned(node: _Assignment) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]


def _other_tensors(nodes: Sequence[ast.AST]) -> list[str]:
    """Return the arguments of a forward besides self and the first one, without numbers and flags."""
    found: list[str] = []
    for given in [node for node in nodes if isinstance(node, ast.arguments)][:1]:
        plain = [*given.posonlyargs, *given.args]
        defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        for one, default in zip([*plain, *given.kwonlyargs], defaults, strict=True):
            value = default.value if isinstance(default, ast.Constant) else None
            number = isinstance(value, int | float | str) or getattr(one.annotation, "id", "") in _NUMBERS
            found += [] if number or one.arg in ("self", given.args[1].arg) else [one.arg]
    return found


def _child_called(called: ast.AST) -> str:
    """Return NAME if `called` is `self.NAME`, else ""."""
    return called.attr if isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "self" else ""


def _forward(module: nn.Module) -> tuple[ast.AST, ...]:
    """Return the nodes of a module's forward, its definition first; () without source or without arguments."""
    return _nodes(inspect.unwrap(type(module).forward))


@lru_cache(256)
def _nodes(forward: Any) -> tuple[ast.AST, ...]:
    try:
        definition = source_of(forward).body[0]
    except (OSError, SyntaxError, TypeError):
        return ()
    found = isinstance(definition, ast.FunctionDef) and len(definition.args.args) > 1
    return tuple(ast.walk(definition)) if found else ()
