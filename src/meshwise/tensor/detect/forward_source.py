"""Find out how a module's forward uses its input and its children's outputs, from the source of the forward.

Several linears that read one tensor may share one gather at the entry of the module around them, if nothing else reads
the tensor (`only_read_by`). Any other reader (a norm, a residual) needs this rank's part of it. If the source is
unclear, every linear gathers separately, which costs only traffic. A forward that reads sizes of its input needs the
gathered input (`reads_no_sizes`, `splits_by_width`). A forward that splits a child's output shows that the child is a
fused matrix (`fused_children`). A square matrix that reads the input is colwise (`reads_input`)."""

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import TypeAlias

from torch import nn

from meshwise.model.parameter_units import source_of
from meshwise.tensor.detect.attention_names import HEAD_WIDTHS, HEADS, KEY_HEADS

_KEEPS_ORDER = frozenset({"clamp", "contiguous", "float", "to", "type_as"})
_RESHAPING = frozenset({"view", "reshape", "split", "unflatten"})
_OF_ITS_SHAPE = frozenset({"shape", "size", "dim", "ndim", "dtype", "device"})
"""Attributes and methods of a tensor that read no values."""
_Variables: TypeAlias = dict[str, tuple[str, bool] | None]


def only_read_by(module: nn.Module, *, children: Collection[str], others: Collection[str] = ()) -> bool:
    """Return whether each of `children` reads the first argument of a module's forward, and no other code reads it.

    Other code may read its sizes, dtype or device. The argument may get a second name (`source`):

        q, k, v = self.q(x), self.k(x), self.v(x)
        source = x if memory is None else memory            k, v = self.k(source), self.v(source)

    `others`: children that may read only the second name, which may be another tensor. False without source code."""
    definition = _forward(module)
    if definition is None:
        return False
    itself, given = (argument.arg for argument in definition.args.args[:2])
    also, harmless = _second_names(definition, given)
    harmless |= _asked_for_sizes(definition)
    readers: dict[str, set[str]] = {given: set(), also: set()}
    for node in _nodes(definition):
        match node:
            case ast.Call(func=func, args=[ast.Name(id=name) as read]) if name in readers:
                if (called := _child_called(func, itself)) in (*children, *others):
                    readers[name].add(called)
                    harmless.add(id(read))
    reading = readers[given] if others else readers[given] | readers[also]
    loads = [node for node in _nodes(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return reading == set(children) and all(id(node) in harmless for node in loads if node.id in readers)


def reads_no_sizes(module: nn.Module) -> bool:
    """Return whether a module's forward never reads sizes, dtype or device of its first argument.

    Return False if the forward has no source code, or passes the argument to a method, which may read the sizes."""
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
    """Return whether a forward uses the number of features of its first argument, and only for reshaping.

    The forward may pass the number to view, reshape, split and unflatten, or divide it by `//` (a number of heads).
    Return False if the forward has no source code, or does not unpack the sizes.

        B, T, C = x.size()        q, k, v = self.qkv(x).split(C, dim=2)        q.view(B, T, self.heads, C // self.heads)
    """
    definition = _forward(module)
    if definition is None:
        return False
    given = definition.args.args[1].arg
    names, harmless = set(), set[int]()
    for node in _nodes(definition):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[*_, ast.Name(id=name)])], value=value):
                names |= {name} if ast.unparse(value) in (f"{given}.shape", f"{given}.size()") else set()
            case ast.Call(func=ast.Attribute(attr=method), args=args) if method in _RESHAPING:
                harmless |= {id(argument) for argument in args}
            case ast.BinOp(left=left, op=ast.FloorDiv()):
                harmless.add(id(left))
    uses = [n for n in _nodes(definition) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    return bool(uses) and all(id(node) in harmless for node in uses)


def reads_input(module: nn.Module) -> Mapping[str, bool]:
    """Return whether each child that a module's forward calls reads the forward's first argument, by name.

    The other children read tensors that were computed from it. A child that reads both is left out."""
    found: dict[str, set[bool]] = {}
    for node, given in _traced(_forward(module)):
        if isinstance(node, ast.Call) and node.args and (child := _child_called(node.func, "self")):
            behind = _child_behind(node.args[0], given)
            found.setdefault(child, set()).add(behind is not None and not behind[0])
    return {child: both == {True} for child, both in found.items() if len(both) == 1}


def fused_children(module: nn.Module) -> Mapping[str, bool]:
    """Return the children whose output the module's forward splits, directly or through a variable, by name.

    The value is True if the forward first views the output as heads, and splits each head."""
    found: dict[str, bool] = {}
    for node, given in _traced(_forward(module)):
        if (source := _split_expression(node)) and (child := _child_behind(source, given)):
            last = isinstance(node, ast.Subscript) or any(ast.unparse(word.value) == "-1" for word in node.keywords)
            if last or not child[1]:
                found.setdefault(*child)
    return found


def is_gated(module: nn.Module, *, names: Collection[str]) -> bool:
    """Return whether children `names` all read the forward's input, and it calls a function of gates, as sigmoid."""
    reads = reads_input(module)
    called = {node.attr for node in _nodes(_forward(module)) if isinstance(node, ast.Attribute)}
    return bool(called & {"sigmoid", "silu", "softplus"}) and all(reads.get(name) for name in names)


def _traced(definition: ast.FunctionDef | None) -> Iterator[tuple[ast.Call | ast.Subscript, _Variables]]:
    """Yield calls and subscripts in the order of execution, with what `_child_behind` returns for each variable."""
    nodes = [node for node in _nodes(definition) if isinstance(node, ast.Assign | ast.Call | ast.Subscript)]
    given: _Variables = {definition.args.args[1].arg: ("", False)} if definition else {}
    # a node follows the nodes in it, and an assignment its value
    for node in sorted(nodes, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0, isinstance(n, ast.Assign))):
        if isinstance(node, ast.Assign):
            behind = _child_behind(node.value, given) if isinstance(node.targets[0], ast.Name) else None
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            given |= dict.fromkeys(names, behind)
        else:
            yield node, given


def _second_names(definition: ast.FunctionDef, given: str) -> tuple[str, set[int]]:
    """Return the variable that `… if … else …` sets to `given` ("" if none), and the ids of these reads of `given`."""
    for node in _nodes(definition):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(body=body, orelse=other)):
                if either := {id(branch) for branch in (body, other) if _is_named(branch, given)}:
                    return name, either
    return "", set()


def _child_called(called: ast.expr, itself: str) -> str:
    """Return NAME if `called` is `self.NAME`, where `itself` is the name of self; else ""."""
    return called.attr if isinstance(called, ast.Attribute) and _is_named(called.value, itself) else ""


def _forward(module: nn.Module) -> ast.FunctionDef | None:
    """Return the syntax tree of a module's forward; None if it has no source, or no argument besides self."""
    try:
        definition = source_of(inspect.unwrap(type(module).forward)).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) and len(definition.args.args) > 1 else None


@lru_cache(256)
def _nodes(definition: ast.FunctionDef | None) -> tuple[ast.AST, ...]:
    """Return all nodes of a definition; cached because a model has many modules of one class."""
    return tuple(ast.walk(definition)) if definition else ()


def _asked_for_sizes(definition: ast.FunctionDef) -> set[int]:
    nodes = _nodes(definition)
    return {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _OF_ITS_SHAPE}


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _child_behind(node: ast.expr, given: _Variables) -> tuple[str, bool] | None:
    """Return (NAME, False) of an expression `self.NAME(...)`, also through a variable or a conversion, or None.

    NAME is "" for the forward's first argument. The flag is True after a view with the width of a head as last size."""
    match node:
        case ast.Name(id=name):
            return given.get(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name, False
        case ast.Call(func=ast.Attribute(value=source, attr=changed), args=args):
            child = _child_behind(source, given)
            if child and child[0] and changed in ("view", "reshape", "unflatten") and args:
                read = {n.attr for n in ast.walk(args[-1]) if isinstance(n, ast.Attribute)}
                of_a_head = read & set(HEAD_WIDTHS) and not read & {*HEADS, *KEY_HEADS}
                return (child[0], True) if of_a_head and changed != "unflatten" else None
            return child if changed in _KEEPS_ORDER or (child and changed in _RESHAPING) else None
    return None


def _split_expression(node: ast.Call | ast.Subscript) -> ast.expr | None:
    """Return the expression that `node` splits by `.split`, `.chunk`, a view or `[..., start:stop]`, or None."""
    match node:
        case ast.Subscript(value=source, slice=ast.Tuple(elts=[ast.Constant(value=first), ast.Slice(step=None)])):
            return source if first is Ellipsis else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="split" | "chunk"), args=[source, *_]):
            return source
        case ast.Call(func=ast.Attribute(value=source, attr=changed), args=[*_, ast.Constant(value=3), _, _]):
            return source if changed in ("view", "reshape", "split", "chunk") else None
        case ast.Call(func=ast.Attribute(value=source, attr="split" | "chunk")):
            return source
    return None
