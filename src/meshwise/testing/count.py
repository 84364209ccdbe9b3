"""`count`: the collectives of a block, as a table to hold against a formula.

    with world.record() as stamps:
        trainer.step(batch)
    count(stamps).check({"reduce_scatter[dp]": (2, 8 * psi), "all_gather[dp]": (2, 8 * psi), …})

A row is named as a record prints, `kind[axis·axis]`, and holds (calls, bytes): the payload of the whole collective as
one rank sees it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwise.comm.api.flight_recorder import CallRecord


class Counts(Mapping[str, tuple[int, int]]):
    """(calls, bytes) by `kind[axes]`. Equal to any mapping with the same entries; prints as a table."""

    def __init__(self, rows: Mapping[str, tuple[int, int]]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> tuple[int, int]:
        """Return the (calls, bytes) of one row; KeyError when nothing of that name was called."""
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return _table([("", "calls", "bytes"), *((name, f"{n:,}", f"{b:,}") for name, (n, b) in self._rows.items())])

    def check(self, expected: Mapping[str, tuple[int, int]]) -> None:
        """Raise AssertionError, with both tables side by side, unless the rows are exactly the expected ones."""
        if self._rows == dict(expected):
            return
        lines = [("", "calls", "expected", "bytes", "expected", "")]
        for name in sorted({*self._rows, *expected}):
            here, there = self._rows.get(name, (0, 0)), expected.get(name, (0, 0))
            mark = "" if here == there else "←"
            lines.append((name, f"{here[0]:,}", f"{there[0]:,}", f"{here[1]:,}", f"{there[1]:,}", mark))
        raise AssertionError(f"the collectives are not the expected ones\n{_table(lines)}")


def count(stamps: Iterable[CallRecord]) -> Counts:
    """Return the collectives of a recording, summed by kind and axes, in alphabetical order."""
    rows: dict[str, tuple[int, int]] = {}
    for stamp in stamps:
        name = f"{stamp.kind}[{'·'.join(stamp.axes)}]"
        calls, size = rows.get(name, (0, 0))
        rows[name] = (calls + 1, size + stamp.bytes)
    return Counts(dict(sorted(rows.items())))


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
