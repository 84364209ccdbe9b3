"""Draw plans as text in the terminal: the mesh, the timeline and the memory of each plan."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from meshwise.base.text_format import time_text
from meshwise.simulate.predicted_timeline import MemoryHistory, MemoryLevel
from meshwise.simulate.simulation_tables import size_text
from meshwise.simulate.step_tape import Category
from meshwise.view.plan_account import PlanAccount
from meshwise.view.schedule_text import draw_to_scale

LETTERS: Mapping[Category, tuple[str, str]] = {
    Category.PARAMETERS: ("p", "black on bright_blue"),
    Category.GATHERED: ("w", "black on bright_cyan"),
    Category.GRADIENTS: ("g", "black on green"),
    Category.OPTIMIZER: ("o", "black on magenta"),
    Category.REDUCTION: ("r", "black on bright_magenta"),
    Category.ACTIVATIONS: ("a", "black on yellow"),
    Category.STAGING: ("s", "black on red"),
    Category.COMMUNICATION: ("c", "black on white"),
}
"""Letter and rich style of each category of memory."""
_HEIGHT = 8


def memory_text(history: MemoryHistory, *, width: int, seconds: float, name: str) -> Text:
    """Return the drawing of one rank's memory over time; `seconds` fill `width` characters."""
    peak = history.peak
    heads = [size_text(peak.bytes), *[""] * (_HEIGHT - 1)]
    left = max(map(len, heads))
    columns = max(1, round((width - left - 2) * history.seconds / seconds))
    levels = [max(part, key=lambda level: level.bytes) for part in _parts(history.levels, columns)]
    bars = [_bar(level, peak.bytes / _HEIGHT) for level in levels]
    lines = [Text(f"memory of {name}, at most {size_text(peak.bytes)}, during {peak.during}")]
    for head, row in zip(heads, range(_HEIGHT - 1, -1, -1), strict=True):
        line = Text(f"{head:>{left}} │")
        for bar in bars:
            line.append(*LETTERS[bar[row]] if row < len(bar) else (" ",))
        lines.append(line)
    categories = [category for category in Category if history.holds(category)]
    lines.append(Text(" " * (left + 2)) + Text("  ").join(Text(f"{LETTERS[one][0]} {one}") for one in categories))
    return Text("\n").join(lines)


def _parts(levels: Sequence[MemoryLevel], count: int) -> list[Sequence[MemoryLevel]]:
    """Return `count` parts of `levels` of about the same length, each with at least one level."""
    cuts = [index * len(levels) // count for index in range(count + 1)]
    return [levels[start : max(stop, start + 1)] for start, stop in pairwise(cuts)]


def _bar(level: MemoryLevel, unit: float) -> list[Category]:
    """Return, from the bottom up, the category that fills the middle of each row of a column."""
    bar: list[Category] = []
    total = 0.0
    for category in Category:
        total += level.device.get(category, 0)
        bar += [category] * (round(total / unit) - len(bar))
    return bar


def drawings(accounts: Sequence[PlanAccount], *, width: int) -> Iterator[Text]:
    """Yield title, mesh, timeline and memory of each plan as text. The longest step fills `width` characters."""
    seconds = max(account.timeline.seconds for account in accounts)
    for account in accounts:
        yield Text(f"{account.title}: step {time_text(account.timeline.seconds, unit=account.unit)}", "bold")
        if account.mesh is not None:
            yield Text(account.mesh.picture())
        yield draw_to_scale(account.timeline, width=width, seconds=seconds, rows=account.names)
        for history in account.histories:
            yield memory_text(history, width=width, seconds=seconds, name=account.names[history.index])
