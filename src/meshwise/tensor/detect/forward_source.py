"""Find out how a module's forward uses its input and its children's outputs, from the source of the forward.

Several linears that read one tensor may share one gather at the entry of the module around them, if nothing else reads
the tensor (`only_read_by`). Any other reader (a norm, a residual) needs this rank's part of it. If the source is
unclear, every linear gathers separately, which costs only traffic. A forward that reads sizes of its input needs the
gathered input (`reads_no_sizes`, `splits_by_width`). A forward that splits a child's output shows that the child is a
fused matrix (`fused_children`). The children whose outputs a child reads show its place in a pair (`read_outputs`).

Order and roles are read without branches that an attribute excludes (`if self.is_cross_attention:`, False in this
module). Reads of the input count in every branch, as the attribute may change."""

import ast
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from torch import nn

from meshwise.model.parameter_units import source_of
from meshwise.tensor.detect.attention_names import HEAD_WIDTHS, HEADS, KEY_HEADS

_KEEPS_ORDER = frozenset({"clamp", "contiguous", "float", "to", "type_as", "unsqueeze"})
_RESHAPING = frozenset({"view", "reshape", "split", "unflatten"})
_OF_ITS_SHAPE = frozenset({"shape", "size", "dim", "ndim", "dtype", "device"})
"""Attributes and methods of a tensor that read no values."""
_NUMBERS = frozenset({"bool", "int", "float", "str"})
_SHAPE = "shape"
_Variables: TypeAlias = dict[str, tuple[str, bool] | None]


def only_read_by(module: nn.Module, *, children: Collection[str], others: Collection[str] = ()) -> bool:
    """Return whether each of `children` reads the first argument of a module's forward, and no other code reads it.

    Other code may read its sizes, dtype or device. `others`: children that may read only a second name of the argument,
    as in `source = x if memory is None else memory`. False without source code."""
    nodes = _forward(module, every_branch=True)
    given, uses = _argument(nodes), _uses(nodes)
    also = {use.removeprefix("=") for name, use in uses if name == given and use.startswith("=")}
    first, second = ({use for name, use in uses if name in names} for names in ({given}, also))
    reading = {use for use in (first if others else first | second) if use != _SHAPE and not use.startswith("=")}
    reading = {use for use in reading if getattr(module, use, 0) is not None}  # None: an absent gate, or the like
    calls = [node for node in nodes if isinstance(node, ast.Call) and _child_called(node.func) in children]
    inputs = [getattr(call.args[0], "id", "") for call in calls if call.args]  # a child may read another tensor too
    return {*inputs} <= {given, *also} and reading == {*children} and second <= {*children, *others, _SHAPE}


def reads_no_sizes(module: nn.Module) -> bool:
    """Return whether a module's forward never reads sizes, dtype or device of its first argument.

    Return False if the forward has no source code, or passes the argument to a method, which may read the sizes."""
    nodes = _forward(module, every_branch=True)
    uses = {use for name, use in _uses(nodes) if name == _argument(nodes)} if nodes else {_SHAPE}
    return _SHAPE not in uses and not any(inspect.isfunction(getattr(type(module), use, None)) for use in uses)


def splits_by_width(module: nn.Module) -> bool:
    """Return whether a forward uses the number of features of its first argument, and only for reshaping.

    The forward may pass C of `B, T, C = x.size()` to view, reshape, split and unflatten, divide it by `//` (a number of
    heads), or assert it. Return False if the forward has no source code, or does not unpack the sizes."""
    nodes = _forward(module, every_branch=True)
    given, names, harmless = _argument(nodes), set(), set[int]()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[*_, ast.Name(id=name)])], value=value):
                names |= {name} if ast.unparse(value) in (f"{given}.shape", f"{given}.size()") else set()
            case ast.Call(func=ast.Attribute(attr=method), args=args) if method in _RESHAPING:
                harmless |= {id(each) for one in args for each in getattr(one, "elts", [one])}  # of a list, its entries
            case ast.BinOp(left=left, op=ast.FloorDiv()):
                harmless.add(id(left))
            case ast.Assert():
                harmless |= {id(inner) for inner in ast.walk(node)}
    uses = [node for node in _loads(nodes) if node.id in names]
    return bool(uses) and all(id(node) in harmless for node in uses)


def read_outputs(module: nn.Module) -> Mapping[str, frozenset[str]]:
    """Return, for each child that a module's forward calls, the attributes of self that its arguments come from.

    The children are in the order of their calls. Arguments of the forward besides the first count too, as "gain=",
    unless their default or annotation is a number or flag. For `self.out(self.norm(self.q(x)) * gain)`, q reads {},
    norm reads {q}, and out reads {norm, q, gain=}."""
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


def fused_children(module: nn.Module) -> Mapping[str, bool]:
    """Return the children whose output the module's forward splits, directly or through a variable, by name.

    The value is True if the forward first views the output as heads, and splits each head. A child that is split in
    both ways, as in two branches, is left out."""
    found: dict[str, set[bool]] = {}
    given: _Variables = {}
    for node in _in_order(_forward(module)):
        if isinstance(node, ast.Assign):
            behind = _child_behind(node.value, given) if isinstance(node.targets[0], ast.Name) else None
            given |= dict.fromkeys(_assigned(node), behind)
        elif (split := _split_expression(node)) and (child := _child_behind(split[0], given)):
            found.setdefault(child[0], set()).update({child[1]} if split[1] or not child[1] else ())
    return {name: flags.pop() for name, flags in found.items() if len(flags) == 1}


def is_gated(module: nn.Module, *, names: Collection[str]) -> bool:
    """Return whether no child of `names` reads an output of them, and the forward calls a gate's function (sigmoid)."""
    reads = read_outputs(module)
    called = {node.attr for node in _forward(module) if isinstance(node, ast.Attribute)}
    apart = all(name in reads and not reads[name].intersection(names) for name in names)
    return apart and bool(called & {"sigmoid", "silu", "softplus"})


_Assignment: TypeAlias = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


def _in_order(nodes: Sequence[ast.AST]) -> list[_Assignment | ast.Call | ast.Subscript]:
    """Return the assignments, calls and subscripts of a forward in the order of execution."""
    found = [node for node in nodes if isinstance(node, _Assignment | ast.Call | ast.Subscript)]
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
            found += [] if number or one.arg in ("self", _argument(nodes)) else [one.arg]
    return found


def _uses(nodes: Sequence[ast.AST]) -> set[tuple[str, str]]:
    """Return each variable of a forward with its uses: "NAME" for an argument of `self.NAME(…)`, `_SHAPE` for a read of
    sizes or dtype, "=NAME" for `NAME = variable if … else …`, and "" for any other use.

    The first argument is used until a statement outside of loops replaces it: `x = self.norm(x)`."""
    known: dict[int, str] = {}
    for node in nodes:
        match node:
            case ast.Call(func=func, args=args, keywords=keywords):
                values = (*args, *(word.value for word in keywords))
                known |= dict.fromkeys(map(id, values), _child_called(func))
            case ast.Attribute(value=value, attr=attr) if attr in _OF_ITS_SHAPE:
                known[id(value)] = _SHAPE
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(body=body, orelse=other)):
                known |= dict.fromkeys((id(body), id(other)), f"={name}")
    given, statements = _argument(nodes), getattr(nodes[0], "body", []) if nodes else []
    last = next((each.end_lineno for each in statements if _replaces(each, given)), math.inf)
    return {(n.id, known.get(id(n), "")) for n in _loads(nodes) if n.id != given or n.lineno <= last}


def _replaces(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement assigns a variable, whichever branch it takes."""
    if isinstance(statement, ast.If):
        return all(any(_replaces(one, name) for one in branch) for branch in (statement.body, statement.orelse))
    return isinstance(statement, ast.Assign) and name in _assigned(statement)


def _loads(nodes: Sequence[ast.AST]) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def _child_called(called: ast.AST) -> str:
    """Return NAME if `called` is `self.NAME`, else ""."""
    return called.attr if isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "self" else ""


def _forward(module: nn.Module, *, every_branch: bool = False) -> tuple[ast.AST, ...]:
    """Return the nodes of a module's forward, its definition first, without branches that its attributes exclude.

    Return () if it has no source, or no argument besides self. `every_branch`: excluded branches too."""
    flags = {name: value for name, value in vars(module).items() if type(value) is bool and name != "training"}
    flags = {} if every_branch else flags
    return _live_nodes(inspect.unwrap(type(module).forward), frozenset(flags.items()))


@lru_cache(256)
def _live_nodes(forward: Any, flags: frozenset[tuple[str, bool]]) -> tuple[ast.AST, ...]:
    try:
        definition = source_of(forward).body[0]
    except (OSError, SyntaxError, TypeError):
        return ()
    live: list[ast.AST] = [definition]
    for node in live:  # it grows
        match node:
            case ast.If(test=test, body=body, orelse=other):
                negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                taken = dict(flags).get(_child_called(test.operand if isinstance(test, ast.UnaryOp) else test))
                live += ast.iter_child_nodes(node) if taken is None else body if taken != negated else other
            case _:
                live += ast.iter_child_nodes(node)
    return tuple(live) if isinstance(definition, ast.FunctionDef) and len(definition.args.args) > 1 else ()


def _argument(nodes: Sequence[ast.AST]) -> str:
    """Return the name of a forward's first argument, or "" without source code."""
    return next((node.args[1].arg for node in nodes if isinstance(node, ast.arguments)), "")


def _child_behind(node: ast.expr, given: _Variables) -> tuple[str, bool] | None:
    """Return (NAME, False) of an expression `self.NAME(...)`, also through a variable or a conversion, or None.

    The flag is True after a view with the width of a head as last size."""
    match node:
        case ast.Name(id=name):
            return given.get(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name, False
        case ast.Call(func=ast.Attribute(value=source, attr=changed), args=args):
            child = _child_behind(source, given)
            if child and changed in ("view", "reshape", "unflatten") and args:
                return (child[0], True) if _is_width_of_head(args[-1]) and changed != "unflatten" else None
            keeps = changed in _KEEPS_ORDER or changed in _RESHAPING or (child and child[1] and changed == "transpose")
            return child if keeps else None
    return None


def _is_width_of_head(size: ast.expr) -> bool:
    """Return whether an expression contains the width of a head, and no number of heads."""
    read = {node.attr for node in ast.walk(size) if isinstance(node, ast.Attribute)}
    return bool(read & {*HEAD_WIDTHS}) and not read & {*HEADS, *KEY_HEADS}


def _split_expression(node: ast.AST) -> tuple[ast.expr, bool] | None:
    """Return the expression that `node` splits by `.split`, `.chunk`, a view or `[..., start:stop]`, or None.

    The flag is True if it splits the last dim, or into widths of a head."""
    match node:
        case ast.Subscript(value=source, slice=ast.Tuple(elts=[ast.Constant(value=first), ast.Slice(step=None)])):
            return (source, True) if first is Ellipsis else None
        case ast.Call(func=ast.Attribute(value=source, attr="split" | "chunk"), args=sizes, keywords=keywords):
            if getattr(source, "id", "") == "torch" and sizes:
                source, *sizes = sizes
            last = any(ast.unparse(word.value) == "-1" for word in keywords)
            return source, last or any(map(_is_width_of_head, sizes[:1]))
        case ast.Call(func=ast.Attribute(value=source, attr=changed), args=[*_, ast.Constant(value=3), _, _]):
            return (source, False) if changed in ("view", "reshape") else None
    return None
