"""Align the columns of a table of text."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the rows as lines of text, two blanks between columns.

    The first `left` columns are aligned on the left, the others on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if column < left else ">" for column in range(len(widths))]
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)
