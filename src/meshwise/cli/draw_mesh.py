"""`meshwise draw mesh`: which rank is where along the axes of a plan, and which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.cli.drawing_output import DrawingFiles, check, drawing_board, save_picture
from meshwise.plan import Plan
from meshwise.simulate.cluster import ClusterError, parse_cluster
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.view.mesh_picture import mesh_picture
from meshwise.view.picture import stacked


@dataclass(frozen=True)
class DrawMesh:
    """Draw the ranks of a plan: a grid for the two innermost axes, one beside the other for the rest."""

    plan: str = ""
    """The plan, as in "pp=2 dp=2 tp=2"."""

    on: str = ""
    """A cluster, as in "4x8 h100": its ranks are those that dp=auto fills, and the picture tells its nodes apart."""

    png: Path | None = None
    """Draw a PNG; needs the extra `plot`."""

    svg: Path | None = None
    """Draw an SVG."""


def main(words: Sequence[str]) -> int:
    """Draw what the words name. Raises JobError or PlanError for a mesh that there is not."""
    flags = parse_flags(words, prog="meshwise draw mesh", default=DrawMesh())
    if not flags.plan:
        raise JobError('give a plan: meshwise draw mesh --plan "pp=2 dp=2 tp=2"')
    check(DrawingFiles(png=flags.png, svg=flags.svg))
    plan = Plan.parse(flags.plan)
    try:
        cluster = parse_cluster(flags.on) if flags.on else None
    except ClusterError as error:
        raise JobError(f"--on: {error}") from error
    if cluster is not None:
        plan = plan.resolve(cluster.ranks)
    elif plan.dp is None:
        raise JobError('dp=auto fills a cluster: name it, as in --on "4x8 h100"')
    mesh = plan.mesh()
    picture = mesh_picture(mesh, ranks_per_node=cluster.ranks_per_node if cluster else 0)
    drawing_board().print(mesh.picture(), highlight=False, markup=False, soft_wrap=True)
    save_picture(stacked([picture]), png=flags.png, svg=flags.svg)
    return 0
