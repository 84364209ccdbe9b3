"""More ranks than key heads: twins, ranks that hold the same ones.

With grouped-query attention the heads are shared out and there may be fewer key heads than ranks. Then the axis that
splits the heads is two axes, the outer one for the key heads, the inner one, `twin`, for ranks that share one:

    | 4 heads, 2 key heads            tp=0                    tp=1
    | on 4 ranks                twin=0      twin=1      twin=0      twin=1
    | q                            0           1           2           3
    | k, v                         0           0           1           1          gradients summed over twin

Everything else that was split over the one axis is split over both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from meshwise.base.mesh import Mesh
from meshwise.plan import Plan
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes import scheme

TWIN = "twin"


def mesh_with_twins(plan: Plan, *, parts: Iterable[Part]) -> Mesh:
    """Return the plan's mesh, with twins where an attention among the parts needs them."""
    mesh, twins = plan.mesh(), max((part.twins for part in parts), default=1)
    if twins == 1:
        return mesh
    axis = scheme(plan, blocks=True).inner[-1]
    axes = []
    for name, degree in mesh.axes:
        axes += [(name, degree // twins), (TWIN, twins)] if name == axis else [(name, degree)]
    return Mesh(tuple(axes))


def scheme_on(mesh: Mesh, *, plan: Plan, blocks: bool) -> Scheme:
    """Return the plan's scheme on a mesh that may have twins."""
    plain = scheme(plan, blocks=blocks)
    if TWIN not in mesh.names:
        return plain
    axis = scheme(plan, blocks=True).inner[-1]
    split: Scheme = _with_twins(plain, axis)
    return dataclasses.replace(split, twins=(TWIN,))


def _with_twins(value: Any, axis: str) -> Any:
    """Return the value with the axis replaced by the two, wherever it holds it."""
    if isinstance(value, tuple):
        return tuple(name for each in value for name in ((each, TWIN) if each == axis else (each,)))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _with_twins(getattr(value, field.name), axis) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)
