"""The parameter table: one row for each logical parameter of a model.

Everything that touches parameters (initialisation, gradient reduction, the norm, the optimizer, checkpoints) asks this
table and never walks the module itself. So a parameter has one name everywhere. A tied one, registered under several
names, is still one parameter: gathered once, counted once in the norm, updated once, saved once.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshwise.base.mesh import Mesh
from meshwise.layout import Layout
from meshwise.model.parameter_units import GatheredModule, Patterns, partition
from meshwise.plan.degrees import REPLICAS

ParameterOptions: TypeAlias = Callable[[str, Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class Placement:
    """Placement of one parameter, and the axes over which its copies' gradients are summed.

    On axes that are in neither, all copies are identical and get identical gradients.
    """

    layout: Layout
    summed: tuple[str, ...]


@dataclass(frozen=True)
class ParameterRow:
    """One logical parameter."""

    name: str
    """Its first name in registration order."""
    shape: tuple[int, ...]
    """Full shape."""
    dtype: torch.dtype
    """As the module declares it."""
    trainable: bool
    """Whether it gets a gradient."""
    aliases: tuple[str, ...]
    """The other names of the same parameter: ties."""
    unit: str
    """Name of the unit it belongs to."""
    options: tuple[tuple[str, Any], ...]
    """Optimizer options that differ from the optimizer's own, sorted by key."""
    layout: Layout
    """Which part of it a rank stores; over the ranks of `summed`, ZeRO may cut that further."""
    summed: tuple[str, ...]
    """The mesh axes over which its gradients are parts of a sum: those of the ranks with other rows of the batch."""
    held_at: tuple[tuple[str, int], ...] = ()
    """The only ranks that hold it, as (mesh axis, coordinate): those of a pipeline's stage, of an expert. (): all."""
    counted_elsewhere: bool = False
    """Whether an earlier stage of a pipeline holds the same parameter, and counts it in norms and checkpoints."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def at(self, placement: Placement) -> "ParameterRow":
        """Return the same parameter, stored like this."""
        return replace(self, layout=placement.layout, summed=placement.summed)

    def copies(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes over which both the parameter and its gradient are the same on every rank."""
        other = {*self.layout.axes, *self.summed, *dict(self.held_at)}
        return tuple(axis for axis in mesh.names if axis not in other)

    def is_on(self, mesh: Mesh, *, rank: int) -> bool:
        """Return whether `rank` holds the parameter, or its part of it."""
        coordinate = mesh.coordinate(rank)
        return all(coordinate[axis] == index for axis, index in self.held_at)

    def part(self, full: Tensor, *, mesh: Mesh, rank: int) -> Tensor:
        """Return the part of the full tensor that `rank` stores: a view if that is one rectangle."""
        pieces = [full[piece.slices] for piece in self.layout.pieces(self.shape, mesh=mesh, rank=rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.layout.section_dim)

    def put(self, part: Tensor, *, into: Tensor, mesh: Mesh, rank: int) -> None:
        """Write what `rank` stores into its place in the full tensor."""
        pieces = self.layout.pieces(self.shape, mesh=mesh, rank=rank)
        sizes = [piece.sizes[self.layout.section_dim] for piece in pieces] if self.shape else []
        parts = part.split(sizes, dim=self.layout.section_dim) if len(pieces) > 1 else [part]
        for piece, values in zip(pieces, parts, strict=True):
            into[piece.slices] = values


@dataclass(frozen=True)
class ParameterUnit:
    """Parameters that are gathered and reduced together."""

    name: str
    """The modules that own its parameters, joined by `+`."""
    modules: tuple[str, ...]
    """Every module whose forward needs one of the parameters; the root is the empty string."""
    rows: tuple[ParameterRow, ...]
    """Its parameters, in registration order."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(row.numel for row in self.rows)


@dataclass(frozen=True)
class ParameterTable:
    """The rows of a model, by unit, in forward order."""

    units: tuple[ParameterUnit, ...]

    @cached_property
    def rows(self) -> tuple[ParameterRow, ...]:
        """All rows, unit by unit."""
        return tuple(row for unit in self.units for row in unit.rows)

    @cached_property
    def _by_name(self) -> dict[str, ParameterRow]:
        return {name: row for row in self.rows for name in (row.name, *row.aliases)}

    @property
    def numel(self) -> int:
        """Number of elements, ties counted once."""
        return sum(row.numel for row in self.rows)

    def placed(self, placements: Mapping[str, Placement]) -> "ParameterTable":
        """Return the table of a model whose parameters, by first name, are stored like this; all of them are given."""
        return self._with_rows(lambda row: [row.at(placements[row.name])])

    def held_at(self, *where: tuple[str, int], counted_elsewhere: Collection[str] = ()) -> "ParameterTable":
        """Return the table of a model that only the ranks at these (axis, coordinate) hold, such as a stage.

        `counted_elsewhere`: names of parameters that an earlier stage holds too.
        """
        return self._with_rows(
            lambda row: [replace(row, held_at=where, counted_elsewhere=row.name in counted_elsewhere)]
        )

    def on(self, mesh: Mesh, *, rank: int) -> "ParameterTable":
        """Return the table of the parameters that `rank` holds, without modules that have none of theirs there."""
        units = []
        for unit in self.units:
            here = tuple(row for row in unit.rows if row.is_on(mesh, rank=rank))
            absent = {row.name for row in unit.rows} - {row.name for row in here}
            lost = [
                name for name in unit.modules if _is_under(name, absent) and not _is_under(name, [r.name for r in here])
            ]
            if here:
                units.append(replace(unit, rows=here, modules=tuple(name for name in unit.modules if name not in lost)))
        return ParameterTable(tuple(units))

    def _with_rows(self, rows_for: Callable[[ParameterRow], Sequence[ParameterRow]]) -> "ParameterTable":
        """Return the table with `rows_for(row)` in place of each row, without the units that have none left."""
        units = [replace(unit, rows=tuple(new for row in unit.rows for new in rows_for(row))) for unit in self.units]
        return ParameterTable(tuple(unit for unit in units if unit.rows))

    def row(self, name: str) -> ParameterRow:
        """Return the row of a parameter under any of its names. Raises ValueError, with near misses, for another
        name.
        """
        if name not in self._by_name:
            near = difflib.get_close_matches(name, self._by_name, n=3, cutoff=0.4)
            raise ValueError(f"no parameter {name!r}; near names: {near or list(self._by_name)[:3]}")
        return self._by_name[name]


def matrices_decay(name: str, parameter: Tensor) -> Mapping[str, Any]:  # noqa: ARG001 (the signature of all such rules)
    """Return the default options: biases, norms' gains and other vectors are not decayed (Loshchilov & Hutter leave it
    open; GPT-2 and its successors do this).
    """
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def parameter_table(
    module: nn.Module,
    *,
    options: ParameterOptions | None = None,
    units: Patterns = (),
    replicas: Sequence[str] = REPLICAS,
) -> ParameterTable:
    """Read a model, on any device, meta included.

    `options(name, parameter)` gives optimizer options for a parameter (default `matrices_decay`). `units` overrides how
    the model is divided; see `model.parameter_units.partition`. Every parameter is whole on every rank, and its
    gradients are summed over the axes `replicas`, until `placed` says otherwise.

    Raises ValueError as `check_trains` and `check_readable` do, for options that are no mapping, for two different
    parameters that share memory, and for a pattern in `units` that matches nothing.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    check_trains(module)
    check_readable(module)
    _check(names)
    rule = options or matrices_decay
    owner: dict[str, str] = {}
    divided = partition(module, units=units)
    for pieces in divided:
        for piece in pieces:
            for name in piece.parameters:
                owner.setdefault(name, piece.module)
    rows: dict[str, ParameterRow] = {}
    unit_of = {piece.module: _unit_name(pieces, owner) for pieces in divided for piece in pieces}
    for parameter, (first, *aliases) in names.items():
        rows[first] = ParameterRow(
            name=first,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            trainable=parameter.requires_grad,
            aliases=tuple(aliases),
            unit=unit_of[owner[first]],
            options=_options_of(rule, first, parameter),
            layout=Layout.replicated(parameter.ndim),
            summed=tuple(replicas),
        )
    users: dict[str, list[str]] = {}
    for pieces in divided:
        for piece in pieces:
            for unit in dict.fromkeys(rows[name].unit for name in piece.parameters):
                users.setdefault(unit, []).append(piece.module)
    return ParameterTable(
        tuple(
            ParameterUnit(unit, tuple(modules), tuple(row for row in rows.values() if row.unit == unit))
            for unit, modules in users.items()
        )
    )


def _is_under(module: str, parameters: Iterable[str]) -> bool:
    """Return whether a module holds one of the parameters, by their names."""
    return any(name.startswith(f"{module}." if module else "") for name in parameters)


def _unit_name(pieces: list[GatheredModule], owner: dict[str, str]) -> str:
    names = [p.module or "(root)" for p in pieces if any(owner[n] == p.module for n in p.parameters)]
    return "+".join(names) if len(names) <= 3 else f"{names[0]}+…+{names[-1]}"


def _options_of(rule: ParameterOptions, name: str, parameter: Tensor) -> tuple[tuple[str, Any], ...]:
    given = rule(name, parameter)
    if not isinstance(given, Mapping):
        raise ValueError(  # noqa: TRY004
            f"parameter_options returned {given!r} for {name}; it must return optimizer options by name, {{}} for none"
        )
    return tuple(sorted(given.items()))


def check_trains(module: nn.Module) -> None:
    """Raise ValueError for a model without parameters."""
    if next(module.parameters(), None) is None:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to train")


def check_readable(module: nn.Module) -> None:
    """Raise ValueError for parameters that cannot be looked at: they have no shape yet, or are TorchScript's."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; call the model once on an example before handing it over")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(  # noqa: TRY004
                f"{name or 'the model'} is compiled by TorchScript, which keeps its parameters to itself; give the "
                "module that it was made of"
            )


def _check(names: Mapping[nn.Parameter, list[str]]) -> None:
    """Refuse parameters that overlap without being one object."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, (name, *_) in names.items():
        if parameter.numel():
            start = int(parameter.storage_offset()) * parameter.element_size()
            extent = 1 + sum((n - 1) * int(step) for n, step in zip(parameter.shape, parameter.stride(), strict=True))
            span = (start, start + extent * parameter.element_size(), name)
            spans.setdefault(parameter.untyped_storage()._cdata, []).append(span)
    for shared in spans.values():
        ordered = sorted(shared, key=lambda span: span[0])
        for (_, end, name), (start, _, other) in pairwise(ordered):
            if start < end:
                raise ValueError(
                    f"{name} and {other} are two parameters over the same memory; to tie them, register the same "
                    "nn.Parameter object under both names"
                )
