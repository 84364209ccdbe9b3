"""Memory over time as text: what a rank holds of each category, one above the other, a letter for each.

3.1 GiB │        aaaaaaaaaaaaa
        │    aaaaaaaaaaaaaaaaaaaaa
        │  aaaaaaaaaaaaaaaaaaaaaaaaaa
        │pppppppppppppppppppppppppppppp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from meshwise.simulate.simulation_tables import text as size_text
from meshwise.simulate.step_history import MemoryLevel, StepHistory
from meshwise.simulate.tape import Category

LETTERS: Mapping[Category, tuple[str, str]] = {
    Category.PARAMETERS: ("p", "black on bright_blue"),
    Category.GATHERED: ("w", "black on bright_cyan"),
    Category.GRADIENTS: ("g", "black on green"),
    Category.OPTIMIZER: ("o", "black on magenta"),
    Category.ACTIVATIONS: ("a", "black on yellow"),
    Category.STAGING: ("s", "black on red"),
    Category.COMMUNICATION: ("c", "black on white"),
}
"""How each category is written: `w` for parameters that are whole while they are used."""

_HEIGHT = 8


def memory_text(history: StepHistory, *, width: int, seconds: float, name: str) -> Text:
    """Return the drawing of one rank, `seconds` in `width` characters."""
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
    held = [category for category in Category if history.holds(category)]
    lines.append(Text(" " * (left + 2)) + Text("  ").join(Text(f"{LETTERS[one][0]} {one}") for one in held))
    return Text("\n").join(lines)


def _parts(levels: Sequence[MemoryLevel], count: int) -> list[Sequence[MemoryLevel]]:
    """Return `count` stretches of about the same length, each with at least one level."""
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
