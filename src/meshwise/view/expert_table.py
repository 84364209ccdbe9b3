"""Show as text which experts, which parts of them and which tokens each rank of a plan has in a mixture."""

from collections.abc import Iterable

from meshwise.base.mesh import Mesh, even_split
from meshwise.base.text_format import align_columns
from meshwise.plan import Plan

MOST_RANKS = 32
"""Most ranks in a table."""


def expert_table(plan: Plan, *, experts: int) -> str:
    """Return a table with a line for each rank: its rows of the batch, tokens, experts, and its part of each matrix.

    The last column has the ranks that hold the same parameters, and sum the gradients. Raises ValueError while dp is
    auto, and for fewer experts than `ep`."""
    mesh = plan.mesh()
    if experts < plan.ep:
        raise ValueError(f"ep={plan.ep} divides at least as many experts, not {experts}; give --experts {plan.ep}")
    inner = mesh.expand(["etp"])
    tokens = [axis for axis in mesh.expand((*plan.token_axes, *plan.tensor_axes)) if axis not in inner]
    table: list[tuple[str, ...]] = [("rank", "stage", "rows", "tokens", "experts", "inner", "same on ranks")]
    for rank in range(min(mesh.size, MOST_RANKS)):
        start, stop = even_split(experts, plan.ep)[mesh.index(rank, axis="ep")]
        same = mesh.group(rank, axes=mesh.others(("pp", "ep", "etp")))
        places = (_place(mesh, rank, axes) for axes in (["pp"], plan.row_axes, tokens))
        held = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        table.append((str(rank), *places, held, _place(mesh, rank, inner), " ".join(map(str, same))))
    more = [f"… {mesh.size - MOST_RANKS} more ranks"] if mesh.size > MOST_RANKS else []
    return "\n".join([align_columns(table), *more])


def _place(mesh: Mesh, rank: int, axes: Iterable[str]) -> str:
    """Return the place of a rank among the ranks along `axes`, as in `2 of 4`; `all` for one rank."""
    group = mesh.group(rank, axes=tuple(axes))
    return f"{group.index(rank) + 1} of {len(group)}" if len(group) > 1 else "all"
