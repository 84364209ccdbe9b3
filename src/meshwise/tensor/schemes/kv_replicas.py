"""Split grouped-query attention over more ranks than key heads: several ranks hold the same key head.

The mesh axis that splits the heads becomes two axes. The outer axis splits the key heads. Ranks along the inner axis,
`kv`, hold the same key head:

    | 4 heads, 2 key heads            tp=0                    tp=1
    | on 4 ranks                 kv=0        kv=1        kv=0        kv=1
    | q                            0           1           2           3
    | k, v                         0           0           1           1          gradients summed over kv

Other tensors that were split over the one axis are split over both axes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from meshwise.base.mesh import Mesh
from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes import scheme

KV_REPLICA = "kv"
"""Axis of the ranks that hold the same key heads."""


def mesh_with_kv_replicas(plan: Plan, *, parts: Iterable[Part]) -> Mesh:
    """Return the plan's mesh, with the axis `kv` if a part has `kv_replicas` above 1."""
    mesh, kv_replicas = plan.mesh(), max((part.kv_replicas for part in parts), default=1)
    if kv_replicas == 1:
        return mesh
    axis = scheme(plan, blocks=True).inner[-1]
    if axis not in mesh.names:
        raise PlanError(
            f"under '{plan}' {kv_replicas} ranks share each key head, and ep or etp takes a part of the ranks of tp. "
            "Take a tp of at most the number of key heads, or ep and etp that take all ranks of tp or none of them"
        )
    axes = []
    for name, degree in mesh.axes:
        axes += [(name, degree // kv_replicas), (KV_REPLICA, kv_replicas)] if name == axis else [(name, degree)]
    return Mesh(tuple(axes), joint=tuple((name, _with_kv_replicas(parts, axis)) for name, parts in mesh.joint))


def scheme_on(mesh: Mesh, *, plan: Plan, blocks: bool) -> Scheme:
    """Return the plan's scheme inside (`blocks`) or outside of the blocks, with `kv` in its axes if `mesh` has it."""
    plain = scheme(plan, blocks=blocks)
    if KV_REPLICA not in mesh.names:
        return plain
    axis = scheme(plan, blocks=True).inner[-1]
    split: Scheme = _with_kv_replicas(plain, axis)
    return dataclasses.replace(split, kv_replicas=(KV_REPLICA,))


def _with_kv_replicas(value: Any, axis: str) -> Any:
    """Return a scheme or axes with every `axis` replaced by the two axes `axis` and `kv`, also in nested fields."""
    if isinstance(value, tuple):
        return tuple(name for each in value for name in ((each, KV_REPLICA) if each == axis else (each,)))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _with_kv_replicas(getattr(value, field.name), axis) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)
