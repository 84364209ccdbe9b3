"""Draw the timeline, memory and mesh of plans as pictures, all plans to the same scale."""

from collections.abc import Iterator, Sequence

from meshwise.base.text_format import time_text
from meshwise.view.memory_picture import memory_pictures
from meshwise.view.mesh_picture import mesh_picture
from meshwise.view.plan_account import PlanAccount
from meshwise.view.shapes import Picture, PictureText, stacked
from meshwise.view.timeline_picture import WIDTH, timeline_picture


def pictures(accounts: Sequence[PlanAccount]) -> Iterator[list[Picture]]:
    """Yield, for each plan, its pictures: the timeline, then memory of ranks and the mesh if they are known."""
    span = max(account.timeline.seconds for account in accounts)
    most = max((history.peak.bytes for account in accounts for history in account.histories), default=0)
    for account in accounts:
        seconds, unit = account.timeline.seconds, account.unit
        title = f"step {time_text(seconds, unit=unit)}, bubble {100 * account.spent['bubble'] / seconds:.1f} %"
        drawn = [timeline_picture(account.timeline, title=title, rows=account.names, span=span, unit=unit)]
        limit = account.room
        drawn += memory_pictures(account.histories, names=account.names, span=span, most=most, limit=limit)
        if account.mesh is not None:
            drawn.append(mesh_picture(account.mesh, ranks_per_node=account.ranks_per_node))
        yield drawn


def picture_sheet(accounts: Sequence[PlanAccount]) -> Picture:
    """Return all pictures of all plans as one picture."""
    parts: list[Picture] = []
    for account, drawn in zip(accounts, pictures(accounts), strict=True):
        parts += [Picture(account.title, WIDTH, 24, (PictureText(account.title, 0, 12, size=15),)), *drawn]
    return stacked(parts)
