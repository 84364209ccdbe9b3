"""All drawings of some plans for the terminal: of each its mesh, what its ranks do when, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from meshwise.view.memory_text import memory_text
from meshwise.view.plan_account import PlanAccount
from meshwise.view.schedule_text import strip
from meshwise.view.time_text import time_text


def drawings(accounts: Sequence[PlanAccount], *, width: int) -> Iterator[Text]:
    """Yield the drawings one after the other, all plans with one scale of time."""
    seconds = max(account.timeline.seconds for account in accounts)
    for account in accounts:
        yield Text(f"{account.title}: step {time_text(account.timeline.seconds, unit=account.unit)}", "bold")
        if account.mesh is not None:
            yield Text(account.mesh.picture())
        yield strip(account.timeline, width=width, seconds=seconds, rows=account.names)
        for history in account.histories:
            yield memory_text(history, width=width, seconds=seconds, name=account.names[history.index])
