"""Text for the terminal: a table with aligned columns (`align_columns`), a time with a unit (`time_text`)."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the rows as lines of text, with two spaces between columns. All rows have the same number of cells.

    The first `left` columns are aligned on the left, the other columns on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if column < left else ">" for column in range(len(widths))]
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def time_text(time: float, *, unit: str = "s") -> str:
    """Return seconds as text with a fitting unit (`12.5 ms`); with another `unit`, format `time` as a plain number."""
    if unit != "s":
        return f"{time:.4g}"
    if time == 0:
        return "0"
    scale, name = next(((scale, name) for scale, name in _UNITS if abs(time) >= scale), _UNITS[-1])
    return f"{time / scale:.4g} {name}"
