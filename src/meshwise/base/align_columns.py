"""Align the columns of a table of text."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the rows as lines of text, with two spaces between columns. All rows have the same number of cells.

    The first `left` columns are aligned on the left, the other columns on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if column < left else ">" for column in range(len(widths))]
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)
