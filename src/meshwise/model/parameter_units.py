"""Divide a model into units: the parameters that are gathered and reduced together.

The parameters of a unit are gathered just before one of its modules runs, and freed afterwards. docs/memory.md has the
rules by which units follow from the structure of a model ("Units").

A forward may read the weight of a child without calling it, and no hook sees the read of an attribute. So a search
reads the source code of `forward`, and of the methods that it calls on `self`. It finds dotted names that lead from
`self` to a child's parameter. It misses a child under another name, and a function without source code."""

import ast
import difflib
import fnmatch
import inspect
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from torch import nn

_NOT_VALUES = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad"})
"""Attributes of a parameter that can be read without its values."""


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


Patterns: TypeAlias = Sequence[str]
"""Patterns over module names; `*` matches one part of a dotted name."""

MERGE_LIMIT = 1.25
"""Largest size of a merged unit, as a multiple of the largest piece or block."""


@dataclass(frozen=True)
class GatheredModule:
    """A module's name, and the `parameters` that its forward needs, each by its first name in the model.

    | block   True for a block (rule 2 in docs/memory.md), and for a module that the user named in `units`
    | spans   True for an opened module: its whole forward uses the parameters, and its children are other pieces"""

    module: str
    parameters: tuple[str, ...]
    block: bool = False
    spans: bool = False


def partition(module: nn.Module, *, units: Patterns = ()) -> list[list[GatheredModule]]:
    """Return the model's units in order of registration, each as a list of pieces. Every parameter is in a piece.

    Each module that a pattern of `units` matches is a unit. Raises ValueError as `select` does."""
    finder = _PieceFinder(module, select(module, units=units))
    finder.visit("", module, entry=False)
    pieces = [piece for piece in finder.pieces() if piece.parameters]
    return _merge(pieces, {name: p.numel() for name, p in module.named_parameters()})


def select(module: nn.Module, *, units: Patterns) -> list[str]:
    """Return the names of the modules that the patterns `units` match.

    Raises ValueError for a pattern that matches no module with parameters, and for a match inside another match."""
    names = [n for n, m in module.named_modules(remove_duplicate=False) if any(True for _ in m.parameters())]
    chosen: list[str] = []
    for pattern in units:
        matched = [name for name in names if matches(name, pattern=pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[1:4]
            raise ValueError(f"units: {pattern!r} matches no module with parameters; did you mean {near}?")
        chosen += [name for name in matched if name not in chosen]
    for name in chosen:
        for outer in chosen:
            if name != outer and (outer == "" or name.startswith(f"{outer}.")):
                raise ValueError(f"units: {name!r} lies inside {outer!r}, a unit already; name only one of them")
    return chosen


def of_all_blocks(name: str) -> str:
    """Return `name` with `*` for every number, as a pattern for all blocks: "blocks.*.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def pattern_of(name: str, *, module: nn.Module) -> str:
    """Return a pattern for a module and its counterparts in other blocks, `layers.*.attention`, if all have one class.

    Otherwise its last number stays, as in `layers.*.0`, which is an attention where `layers.*.1` is an MLP."""
    pattern, words = of_all_blocks(name), name.split(".")
    last = max((place for place, word in enumerate(words) if word.isdigit()), default=0)
    for each in (pattern, ".".join([*pattern.split(".")[:last], *words[last:]])):
        if len({type(one) for other, one in module.named_modules() if matches(other, pattern=each)}) < 2:
            return each
    return name


def matches(name: str, *, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern word by word, with as many words; `*` matches within a word."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


class _PieceFinder:
    """Walk over the tree of modules that collects the pieces."""

    def __init__(self, root: nn.Module, chosen: Collection[str]) -> None:
        self._chosen = chosen
        self._first = {id(p): name for name, p in root.named_parameters()}
        self._found: dict[str, GatheredModule] = {}
        self._direct: dict[str, list[str]] = {}
        self._seen: set[int] = set()

    def pieces(self) -> Iterator[GatheredModule]:
        """Yield the pieces found so far, in the order of their modules."""
        for name, piece in self._found.items():
            yield GatheredModule(name, tuple(self._direct[name]), spans=True) if piece.spans else piece

    def visit(self, name: str, module: nn.Module, *, entry: bool, owner: str = "") -> None:
        """Add the pieces of a module. `entry`: it is in a container. `owner`: the nearest opened module around it."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if name in self._chosen or not self._opens(name, module, entry=entry):
            block = name in self._chosen or (entry and _is_composite(module))
            self._found[name] = GatheredModule(name, self._names(module.parameters()), block=block)
            return
        if name == "" or _has_forward(module):
            owner = name
            self._found[owner] = GatheredModule(owner, (), spans=True)
        names = self._direct.setdefault(owner, [])
        own = (*module.parameters(recurse=False), *read_from_children(module))
        names += [n for n in self._names(own) if n not in names]
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            self.visit(below, child, entry=_is_container(module), owner=owner)

    def _opens(self, name: str, module: nn.Module, *, entry: bool) -> bool:
        below = f"{name}." if name else ""
        if any(chosen.startswith(below) for chosen in self._chosen):
            return True
        if name == "" or not _has_forward(module):
            return name != "" or _is_composite(module)
        if _is_container(module):
            return not entry or _holds_stack(module)
        return not entry and _holds_stack(module)

    def _names(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        return tuple(self._first[id(p)] for p in parameters)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_container(module: nn.Module) -> bool:
    return not _has_forward(module) or type(module).forward is nn.Sequential.forward


def _is_composite(module: nn.Module) -> bool:
    """Return whether a child of the module, at any depth, has parameters."""
    return any(any(True for _ in child.parameters()) for child in module.children())


def _holds_stack(module: nn.Module) -> bool:
    """Return whether the module is or contains a list, dict or sequence of two or more blocks."""
    stacks = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return any(
        isinstance(inner, stacks) and sum(_is_composite(entry) for entry in inner.children()) > 1
        for inner in module.modules()
    )


def _merge(pieces: list[GatheredModule], numel: dict[str, int]) -> list[list[GatheredModule]]:
    """Return the units: pieces that are joined by rule 6 (ties) or by rule 5 (small neighbours)."""
    owner = {name: index for index, piece in reversed([*enumerate(pieces)]) for name in piece.parameters}  # the first
    sizes = [sum(numel[n] for n in piece.parameters if owner[n] == index) for index, piece in enumerate(pieces)]
    limit = MERGE_LIMIT * max(sizes)
    groups = [[index] for index in range(len(pieces))]

    def join_small(a: int, b: int) -> None:
        into, other = groups[min(a, b)], groups[max(a, b)]
        mergeable = into is not other and not any(pieces[i].block or pieces[i].spans for i in (a, b))
        if mergeable and sum(sizes[i] for i in (*into, *other)) <= limit:
            into += other
            for index in other:
                groups[index] = into

    for index, piece in enumerate(pieces):
        for name in piece.parameters:
            join_small(owner[name], index)
    for index in range(len(pieces) - 1):
        join_small(index, index + 1)
    first = sorted({min(group) for group in groups})
    return [[pieces[index] for index in sorted(groups[start])] for start in first]
