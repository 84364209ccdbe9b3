"""Key heads on several ranks, for grouped-query attention with fewer key heads than ranks.

The axis that splits the heads becomes two axes: the outer one for the key heads, the inner one, `kv`, for the ranks
that hold the same key head:

    | 4 heads, 2 key heads            tp=0                    tp=1
    | on 4 ranks                 kv=0        kv=1        kv=0        kv=1
    | q                            0           1           2           3
    | k, v                         0           0           1           1          gradients summed over kv

Everything else that was split over the one axis is split over both.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from meshwise.base.mesh import Mesh
from meshwise.plan import Plan
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes import scheme

KV_REPLICA = "kv"
"""Axis of the ranks that hold the same key heads."""


def mesh_with_kv_replicas(plan: Plan, *, parts: Iterable[Part]) -> Mesh:
    """Return the plan's mesh, with the axis `kv` where an attention among the parts needs it."""
    mesh, kv_replicas = plan.mesh(), max((part.kv_replicas for part in parts), default=1)
    if kv_replicas == 1:
        return mesh
    axis = scheme(plan, blocks=True).inner[-1]
    axes = []
    for name, degree in mesh.axes:
        axes += [(name, degree // kv_replicas), (KV_REPLICA, kv_replicas)] if name == axis else [(name, degree)]
    return Mesh(tuple(axes))


def scheme_on(mesh: Mesh, *, plan: Plan, blocks: bool) -> Scheme:
    """Return the plan's scheme on a mesh that may have the axis `kv`."""
    plain = scheme(plan, blocks=blocks)
    if KV_REPLICA not in mesh.names:
        return plain
    axis = scheme(plan, blocks=True).inner[-1]
    split: Scheme = _with_kv_replicas(plain, axis)
    return dataclasses.replace(split, kv_replicas=(KV_REPLICA,))


def _with_kv_replicas(value: Any, axis: str) -> Any:
    """Return the value with the axis replaced by the two, wherever it holds it."""
    if isinstance(value, tuple):
        return tuple(name for each in value for name in ((each, KV_REPLICA) if each == axis else (each,)))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _with_kv_replicas(getattr(value, field.name), axis) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)
