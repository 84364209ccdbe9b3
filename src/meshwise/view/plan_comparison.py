"""Compare plans as a table: their keys, the parts of a step, and the memory."""

from collections.abc import Sequence

from meshwise.base.text_format import time_text
from meshwise.simulate.predicted_memory import size_text
from meshwise.simulate.step_tape import Category
from meshwise.view.plan_account import PlanAccount

Row = tuple[str, ...]
"""Texts of the cells of a table's row."""
_LAST = ("update", "around", "bubble")
"""Activities that follow the waits in the table."""


def comparison_table(accounts: Sequence[PlanAccount]) -> list[Row]:
    """Return a header of titles, then rows with a column per plan. Keys that are equal in all plans are left out."""
    rows: list[Row] = [("", *(account.title for account in accounts))]
    plans = [account.plan.to_toml() if account.plan else {} for account in accounts]
    keys = dict.fromkeys(key for plan in plans for key in plan)
    differing = (key for key in keys if len({plan[key] for plan in plans if plan}) > 1)
    rows += ((key, *(str(plan.get(key, "")) for plan in plans)) for key in differing)
    rows.append(("step", *(time_text(account.timeline.seconds, unit=account.unit) for account in accounts)))
    found = {what for account in accounts for what in account.spent}
    waits = sorted(found - {"computes", *_LAST})
    for what in (what for what in ("computes", *waits, *_LAST) if what in found):
        rows.append((what, *(_part(account, what) for account in accounts)))
    for fact in dict.fromkeys(fact for account in accounts for fact in account.facts):
        rows.append((fact, *(account.facts.get(fact, "") for account in accounts)))
    for category in (str(category) for category in Category if any(one.peak.get(category) for one in accounts)):
        sizes = (size_text(account.peak.get(category, 0)) if account.peak else "" for account in accounts)
        rows.append((category, *sizes))
    return rows


def _part(account: PlanAccount, what: str) -> str:
    """Return the text of an activity's time, with its percentage of the step."""
    time = account.spent.get(what, 0.0)
    return f"{time_text(time, unit=account.unit)} ({100 * time / account.timeline.seconds:.1f} %)" if time else "0"
