"""Graphs of replicas that mix their parameters with neighbours, as edges and weights (`mixing_weights`).

    | ring           replica r and r ± 1
    | torus          the replicas as the most even grid of rows and columns, each with four neighbours
    | exponential    in round k, replica r takes the parameters of replica r - 2^k mod n (Assran, arXiv 1811.10792)
    | groups:2       groups of 2 neighbouring replicas, all of which are neighbours
    | 0-1,1-2,0-2    edges between replicas

Every column and row of the matrix of weights adds up to 1, so mixing keeps the mean of the replicas. An undirected edge
has the weight 1 / (1 + the larger degree of its ends), after Metropolis and Hastings. In the exponential graph each
replica takes half of one other. `groups:` and edges need not connect all replicas; `check_graph` refuses edges that
leave two parts."""

import itertools
import math
import re
from collections.abc import Mapping

_EDGES = re.compile(r"\d+-\d+(,\d+-\d+)*")


def mixing_weights(graph: str, *, size: int, round_number: int) -> list[Mapping[int, float]]:
    """Return for each of `size` replicas the replicas that it takes parameters of, with weights; itself included."""
    if size == 1:
        return [{0: 1.0}]
    if graph == "exponential":
        hop = 2 ** (round_number % max(1, math.ceil(math.log2(size))))
        return [{replica: 0.5, (replica - hop) % size: 0.5} for replica in range(size)]
    neighbours: list[set[int]] = [set() for _ in range(size)]
    for one, other in _edges(graph, size):
        if one != other:
            neighbours[one].add(other)
            neighbours[other].add(one)
    rows: list[Mapping[int, float]] = []
    for replica, others in enumerate(neighbours):
        row = {other: 1 / (1 + max(len(others), len(neighbours[other]))) for other in sorted(others)}
        rows.append({replica: 1 - math.fsum(row.values()), **row})
    return rows


def check_graph(graph: str, *, size: int) -> None:
    """Raise ValueError for a text that names no graph of `size` replicas, or edges that do not connect them."""
    if graph in ("all", "ring", "torus", "exponential"):
        return
    if found := re.fullmatch(r"groups:([1-9]\d*)", graph):
        if size % int(found[1]):
            raise ValueError(f"sync: graph={graph} does not divide the {size} replicas of the plan; write graph=ring")
        return
    if not _EDGES.fullmatch(graph):
        raise ValueError(
            f"sync: graph={graph!r} is no graph; write ring, torus, exponential, groups:2 or edges such as "
            f"{','.join(f'{one}-{one + 1}' for one in range(max(1, size - 1)))}"
        )
    edges = _edges(graph, size)
    reached, found_more = {0}, True
    while found_more:
        more = {end for edge in edges for end in edge if reached & set(edge)}
        found_more, reached = not more <= reached, reached | more
    if reached != set(range(size)):
        raise ValueError(
            f"sync: graph={graph} does not connect the replicas 0 to {size - 1}, and only these; they would never "
            f"agree. Write graph={','.join(f'{one}-{one + 1}' for one in range(size - 1)) or 'ring'}"
        )


def _edges(graph: str, size: int) -> list[tuple[int, int]]:
    """Return the undirected edges of a graph; an edge may come twice."""
    if graph == "ring":
        return [(one, (one + 1) % size) for one in range(size)]
    if graph == "torus":
        rows = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
        columns = size // rows
        places = itertools.product(range(rows), range(columns))
        right_and_down = [((r, c), [(r, (c + 1) % columns), ((r + 1) % rows, c)]) for r, c in places]
        return [(r * columns + c, s * columns + d) for (r, c), ends in right_and_down for s, d in ends]
    if graph.startswith("groups:"):
        width = int(graph.removeprefix("groups:"))
        starts = range(0, size, width)
        return [edge for start in starts for edge in itertools.combinations(range(start, start + width), 2)]
    first_to_last = (edge.split("-") for edge in graph.split(","))
    return [(int(one), int(other)) for one, other in first_to_last]
