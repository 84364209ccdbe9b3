"""The parameter table: one row for each logical parameter of a model.

All code that uses parameters (initialization, gradient reduction, the norm, the optimizer, checkpoints) reads this
table and never walks the module itself. So a parameter has one name everywhere. A tied parameter is registered under
several names, but is one parameter: gathered once, counted once in the norm, updated once, saved once."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshwise.base.mesh import Mesh
from meshwise.layout.layout import Layout
from meshwise.model.parameter_units import GatheredModule, partition
from meshwise.plan.mesh_axes import REPLICAS

ParameterOptions: TypeAlias = Callable[[str, Tensor], Mapping[str, Any]]
"""Function from a parameter's name and tensor to its optimizer options, such as {"weight_decay": 0.0}."""


@dataclass(frozen=True)
class Placement:
    """Layout of one parameter, and the axes (`summed`) over which the gradients of its copies are summed.

    Over every other axis, all copies of the parameter get identical gradients. `held_at`: as in `ParameterRow`."""

    layout: Layout
    summed: tuple[str, ...]
    held_at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ParameterRow:
    """One logical parameter: as one process would have it, and the ranks that hold parts or copies of it."""

    name: str
    """Its first name in registration order."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...]
    """Other names of the same parameter, if it is tied."""
    unit: str
    options: tuple[tuple[str, Any], ...]
    """Optimizer options that differ from the optimizer's defaults, as (key, value), sorted by key."""
    layout: Layout
    """Layout of the full tensor over the ranks. ZeRO may split a rank's part further, over the axes `summed`."""
    summed: tuple[str, ...]
    """Mesh axes over which the gradients are summed, because their ranks have other rows or tokens of the batch."""
    held_at: tuple[tuple[str, int], ...] = ()
    """(axis, coordinate) pairs: only ranks with all of them hold it (a stage, an expert). Empty: all ranks hold it."""
    counted_elsewhere: bool = False
    """True if an earlier pipeline stage holds the same parameter, and counts it in norms and checkpoints."""
    set_in_forward: bool = False
    """True if each forward sets it to itself, which torch counts as a write: PEFT's `target_parameters` do."""

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return torch.Size(self.shape).numel()

    def at(self, placement: Placement) -> "ParameterRow":
        """Return the row with `layout` and `summed` of `placement`, whose `held_at` is added to the row's own."""
        held_at = (*self.held_at, *placement.held_at)
        return replace(self, layout=placement.layout, summed=placement.summed, held_at=held_at)

    def copy_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of `mesh` over which both the parameter and its gradient are the same on every rank."""
        return mesh.others((*self.layout.axes, *self.summed, *dict(self.held_at)))

    def is_on(self, mesh: Mesh, *, rank: int) -> bool:
        """Return whether `rank` holds the parameter or a part of it."""
        return all(mesh.index(rank, axis=axis) == index for axis, index in self.held_at)

    def part(self, full: Tensor, *, mesh: Mesh, rank: int) -> Tensor:
        """Return the part of the full tensor that `rank` stores: a view if the part is one rectangle, else a copy."""
        pieces = [full[piece.slices] for piece in self.layout.pieces(self.shape, mesh=mesh, rank=rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.layout.section_dim)

    def put(self, part: Tensor, *, into: Tensor, mesh: Mesh, rank: int) -> None:
        """Write `part`, which `rank` stores, to its place in the full tensor `into`."""
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
    """Names of all modules whose forward needs one of the parameters; the root has the name ""."""
    rows: tuple[ParameterRow, ...]
    """Rows of its parameters, in the order of registration."""

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(row.numel for row in self.rows)


@dataclass(frozen=True)
class ParameterTable:
    """The units and rows of a model's parameters, in the order of the forward."""

    units: tuple[ParameterUnit, ...]

    @cached_property
    def rows(self) -> tuple[ParameterRow, ...]:
        """All rows, unit by unit."""
        return tuple(row for unit in self.units for row in unit.rows)

    def placed(self, placements: Mapping[str, Placement]) -> "ParameterTable":
        """Return the table with these placements, by the parameters' first names; other rows stay as they are."""
        return self._with_rows(lambda row: row.at(placements[row.name]) if row.name in placements else row)

    def held_at(self, *where: tuple[str, int], counted_elsewhere: Collection[str] = ()) -> "ParameterTable":
        """Return the table of a part of the model (a stage); only ranks with all these (axis, coordinate) hold it.

        `counted_elsewhere`: names of parameters that an earlier stage holds too."""
        return self._with_rows(lambda row: replace(row, held_at=where, counted_elsewhere=row.name in counted_elsewhere))

    def on(self, mesh: Mesh, *, rank: int) -> "ParameterTable":
        """Return the table of the parameters that `rank` holds; modules with all parameters elsewhere are left out."""
        units = []
        for unit in self.units:
            here = tuple(row for row in unit.rows if row.is_on(mesh, rank=rank))
            names, absent = [row.name for row in here], [row.name for row in unit.rows if row not in here]
            used = (name for name in unit.modules if _is_under(name, names) or not _is_under(name, absent))
            if here:
                units.append(replace(unit, rows=here, modules=tuple(used)))
        return ParameterTable(tuple(units))

    def _with_rows(self, change: Callable[[ParameterRow], ParameterRow]) -> "ParameterTable":
        return ParameterTable(tuple(replace(unit, rows=tuple(map(change, unit.rows))) for unit in self.units))


def matrices_decay(name: str, parameter: Tensor) -> Mapping[str, Any]:  # noqa: ARG001 (the signature of all such rules)
    """Return the default optimizer options: as in GPT-2, no weight decay for biases, norm gains and other vectors."""
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def parameter_table(
    module: nn.Module,
    *,
    options: ParameterOptions | None = None,
    replicas: Sequence[str] = REPLICAS,
    bucket: int | None = 0,
) -> ParameterTable:
    """Return the parameter table of a model on any device, the meta device included.

    | options    returns the optimizer options of a parameter, from its name and value; by default `matrices_decay`
    | replicas   axes over which the gradients of every parameter are summed
    | bucket     bytes up to which neighbouring units are joined, see `bucket_bytes`

    In the returned table every parameter is whole on every rank; `placed` returns a table with other placements.
    Raises ValueError as `check_trains` and `check_readable` do. Also raises ValueError for options that are no
    mapping, and for two parameters that share memory."""
    names = all_names(module)
    check_trains(module)
    check_readable(module)
    _refuse_shared_memory(names)
    rule = options or matrices_decay
    divided = joined_units(module, bucket=bucket)
    pieces = [piece for unit in divided for piece in unit]
    owner = {name: piece.module for piece in reversed(pieces) for name in piece.parameters}  # the first that uses it
    unit_of = {piece.module: _unit_name(unit, owner) for unit in divided for piece in unit}
    rows: dict[str, ParameterRow] = {}
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
            set_in_forward=_is_target_parameter(module, first),
        )
    users: dict[str, list[str]] = {}
    for piece in pieces:
        for name in dict.fromkeys(rows[parameter].unit for parameter in piece.parameters):
            users.setdefault(name, []).append(piece.module)
    return ParameterTable(
        tuple(
            ParameterUnit(name, tuple(modules), tuple(row for row in rows.values() if row.unit == name))
            for name, modules in users.items()
        )
    )


def bucket_bytes(module: nn.Module, *, bucket: int | None = None) -> int:
    """Return the bytes up to which units are joined: `bucket`; for None 25 MiB, but at most an eighth of the model."""
    return min(25 * 2**20, sum(p.nbytes for p in module.parameters()) // 8) if bucket is None else bucket


def joined_units(module: nn.Module, *, bucket: int | None = None) -> list[list[GatheredModule]]:
    """Return the units of a model, with small neighbours joined. bucket: as in `bucket_bytes`.

    A unit of an opened module (`spans`) is not joined: its neighbours would stay gathered for that module's forward."""
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    bucket = bucket_bytes(module, bucket=bucket)
    found: list[list[GatheredModule]] = []
    size = 0.0 if bucket else math.inf
    for unit in partition(module):
        names = {name for piece in unit for name in piece.parameters}
        own = math.inf if any(piece.spans for piece in unit) else sum(sizes[name] for name in names)
        if found and size + own <= bucket:
            found[-1] = [*found[-1], *unit]
            size += own
        else:
            found.append(unit)
            size = own
    return found


def all_names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter of a model; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _is_under(module: str, parameters: Iterable[str]) -> bool:
    """Return whether one of the parameter names lies inside a module."""
    return any(name.startswith(f"{module}." if module else "") for name in parameters)


def _unit_name(pieces: list[GatheredModule], owner: dict[str, str]) -> str:
    names = [p.module or "(root)" for p in pieces if any(owner[n] == p.module for n in p.parameters)]
    return "+".join(names) if len(names) <= 3 else f"{names[0]}+…+{names[-1]}"


def _is_target_parameter(module: nn.Module, name: str) -> bool:
    """Return whether an adapter of PEFT around the owner of a parameter parametrizes it in each forward."""
    owner, _, own = name.rpartition(".")
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
        if vars(module.get_submodule(owner)).get("parameter_name") == own:
            return True
    return False


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


def refuse_sparse(tensor: Tensor, *, what: str) -> None:
    """Raise ValueError for a sparse tensor, because ranks exchange dense ones."""
    if tensor.layout != torch.strided:
        raise ValueError(
            f"the {what} is sparse, and ranks exchange dense tensors. Give the module itself, not a function, after "
            "module.register_buffer(name, buffer.to_dense(), persistent=False)"
        )


def check_readable(module: nn.Module) -> None:
    """Raise ValueError for parameters without a shape (lazy modules), and for sparse buffers."""
    for name, buffer in module.named_buffers():
        refuse_sparse(buffer, what=f"buffer {name}")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; call the model once on an example before handing it over")


def _refuse_shared_memory(names: Mapping[nn.Parameter, list[str]]) -> None:
    """Raise ValueError for two different parameters that share memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, (name, *_) in names.items():
        if parameter.numel():
            start = int(parameter.storage_offset()) * parameter.element_size()
            extent = 1 + sum((n - 1) * int(step) for n, step in zip(parameter.shape, parameter.stride(), strict=True))
            span = (start, start + extent * parameter.element_size(), name)
            spans.setdefault(parameter.untyped_storage()._cdata, []).append(span)
    for shared in spans.values():
        for (_, end, name), (start, _, other) in pairwise(sorted(shared, key=lambda span: span[0])):
            if start < end:
                raise ValueError(
                    f"{name} and {other} are two parameters over the same memory; to tie them, register the same "
                    "nn.Parameter object under both names"
                )
