"""Compare plans as a table and as a picture of bars: their keys, the parts of a step, and the memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from meshwise.base.text_format import time_text
from meshwise.simulate.simulation_tables import size_text
from meshwise.simulate.step_tape import Category
from meshwise.view.plan_account import PlanAccount
from meshwise.view.shapes import Bars, Picture, PicturePath, PictureText, Shape, legend, text_width

Row = tuple[str, ...]
"""Texts of the cells of a table's row."""
_PAINTS: Mapping[str, str] = {"computes": "forward", "update": "update", "around": "between", "bubble": "bubble"}
_WAITS = ("wait", "collective", "message", "tier")
_LETTERS = 60
"""Most letters of a bar's title."""
_WIDTH, _BAR, _PITCH, _TITLE, _LEGEND, _TOTAL = 1180.0, 18.0, 25.0, 26.0, 26.0, 90.0


def comparison_table(accounts: Sequence[PlanAccount]) -> list[Row]:
    """Return a header of titles, then rows with a column per plan. Keys that are equal in all plans are left out."""
    rows: list[Row] = [("", *(account.title for account in accounts))]
    plans = [account.plan.to_toml() if account.plan else {} for account in accounts]
    keys = dict.fromkeys(key for plan in plans for key in plan)
    differing = (key for key in keys if len({plan[key] for plan in plans if plan}) > 1)
    rows += ((key, *(str(plan.get(key, "")) for plan in plans)) for key in differing)
    rows.append(("step", *(time_text(account.timeline.seconds, unit=account.unit) for account in accounts)))
    for what in activities(accounts):
        rows.append((what, *(_part(account, what) for account in accounts)))
    for fact in dict.fromkeys(fact for account in accounts for fact in account.facts):
        rows.append((fact, *(account.facts.get(fact, "") for account in accounts)))
    for category in memory_categories(accounts):
        sizes = (size_text(account.peak.get(category, 0)) if account.peak else "" for account in accounts)
        rows.append((category, *sizes))
    return rows


def activities(accounts: Sequence[PlanAccount]) -> list[str]:
    """Return the names of all activities of the plans' steps: computing first, the bubble last."""
    found = dict.fromkeys(what for account in accounts for what in account.spent)
    waits = sorted(what for what in found if what not in _PAINTS)
    return [what for what in ("computes", *waits, "update", "around", "bubble") if what in found]


def memory_categories(accounts: Sequence[PlanAccount]) -> list[str]:
    """Return the categories of memory that any plan has at its peak."""
    return [str(category) for category in Category if any(account.peak.get(category) for account in accounts)]


def comparison_picture(accounts: Sequence[PlanAccount]) -> Picture:
    """Return two charts with a bar for each plan: the time of its step, and the memory of its fullest rank."""
    charts = [_times(accounts)]
    remembering = [account for account in accounts if account.peak]
    if remembering:
        charts.append(_sizes(remembering))
    left = 16 + max(text_width(bar.title, size=11) for chart in charts for bar in chart.bars)
    shapes: list[Shape] = []
    top = 0.0
    for chart in charts:
        shapes += chart.shapes(left=left, top=top)
        top += chart.height + 14
    return Picture("plans beside one another", _WIDTH, top, tuple(shapes))


@dataclass(frozen=True)
class _Bar:
    """Bar of one plan: the size of each part, their sum (`total`), and a function that formats a size as text."""

    title: str
    parts: Mapping[str, float]
    total: float
    text: Callable[[float], str]


@dataclass(frozen=True)
class _Chart:
    """Bars of all plans; `limit` is drawn as a line, if not 0 and near."""

    title: str
    paints: Mapping[str, str]
    """Paint of each part, in order."""
    bars: tuple[_Bar, ...]
    limit: float = 0.0

    @property
    def height(self) -> float:
        """Height with title and legend."""
        return _TITLE + _PITCH * len(self.bars) + _LEGEND

    def shapes(self, *, left: float, top: float) -> Iterator[Shape]:
        """Yield the shapes of the chart. Its title is at `top`, and its bars begin at `left`."""
        most = max(sum(bar.parts.values()) for bar in self.bars)
        if self.limit < 1.6 * most:
            most = max(most, self.limit)
        scale = (_WIDTH - left - _TOTAL) / most
        yield PictureText(self.title, 0, top + 10, size=13)
        for number, bar in enumerate(self.bars):
            x, y = left, top + _TITLE + number * _PITCH
            yield PictureText(bar.title, left - 10, y + _BAR / 2, size=11, anchor="end")
            for what, paint in self.paints.items():
                if width := scale * bar.parts.get(what, 0):
                    name = f"{what} {bar.text(bar.parts[what])}"
                    yield Bars(paint, ((x, y, width, _BAR),), (name,), bar.title)
                    x += width
            yield PictureText(bar.text(bar.total), x + 8, y + _BAR / 2, size=11)
        bottom = top + _TITLE + _PITCH * len(self.bars)
        if 0 < self.limit <= most:
            x = left + scale * self.limit
            yield PicturePath("limit", ((x, top + _TITLE - 4), (x, bottom)))
        yield from legend([(paint, what) for what, paint in self.paints.items()], x=left, y=bottom + _LEGEND / 2)


def _times(accounts: Sequence[PlanAccount]) -> _Chart:
    names = activities(accounts)
    waits = [name for name in names if name not in _PAINTS]
    paints = {**_PAINTS, **{name: _WAITS[min(number, len(_WAITS) - 1)] for number, name in enumerate(waits)}}
    bars = (
        _Bar(_shortened(one.title), one.spent, one.timeline.seconds, partial(time_text, unit=one.unit))
        for one in accounts
    )
    title = "where the step goes, on the mean over the ranks"
    return _Chart(title, {name: paints[name] for name in names}, tuple(bars))


def _sizes(accounts: Sequence[PlanAccount]) -> _Chart:
    bars = (_Bar(_shortened(one.title), one.peak, sum(one.peak.values()), size_text) for one in accounts)
    limit = min((account.room for account in accounts if account.room), default=0.0)
    title = "what fills the memory of the rank that needs most"
    return _Chart(title, {category: category for category in memory_categories(accounts)}, tuple(bars), limit)


def _shortened(title: str) -> str:
    return title if len(title) <= _LETTERS else f"{title[: _LETTERS - 2]} …"


def _part(account: PlanAccount, what: str) -> str:
    """Return the text of an activity's time, with its percentage of the step."""
    time = account.spent.get(what, 0.0)
    return f"{time_text(time, unit=account.unit)} ({100 * time / account.timeline.seconds:.1f} %)" if time else "0"
