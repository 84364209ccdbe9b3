"""Show measurements of collectives as a table in the terminal and as JSON."""

import json
from collections.abc import Sequence
from itertools import zip_longest

from rich.table import Table

from meshwise.bench.bus_bandwidth import BUS_FACTORS, COPY, Measurement
from meshwise.simulate.predicted_memory import size_text


def rows(measurements: Sequence[Measurement]) -> list[dict[str, str | int | float]]:
    """Return one flat dict for each measurement, sorted by collective: seconds, and bandwidths in bytes per second.
    `share_of_copy` is bus bandwidth / copy bandwidth, for a plain copy of as many bytes by as many ranks."""
    copies = {(one.ranks, one.bytes): one.bus_bandwidth for one in measurements if one.kind == COPY}
    records: list[dict[str, str | int | float]] = []
    order = list(BUS_FACTORS)
    for one in sorted(measurements, key=lambda one: (order.index(one.kind), one.ranks, one.bytes, one.on)):
        copy = copies[one.ranks, one.bytes]
        records.append(
            {
                "collective": one.kind,
                "ranks": one.ranks,
                "bytes": one.bytes,
                "on": one.on,
                "median_seconds": one.median_seconds,
                "min_seconds": one.min_seconds,
                "algorithm_bandwidth": one.algorithm_bandwidth,
                "bus_bandwidth": one.bus_bandwidth,
                "copy_bandwidth": copy,
                "share_of_copy": one.bus_bandwidth / copy,
            }
        )
    return records


def as_json(measurements: Sequence[Measurement]) -> str:
    """Return the dicts of `rows` as the text of a JSON list."""
    return json.dumps(rows(measurements), indent=1) + "\n"


def as_table(measurements: Sequence[Measurement], *, caption: str) -> Table:
    """Return a table for the terminal, with one section per collective, in GB/s (10^9 bytes per second)."""
    table = Table(caption=caption, caption_justify="left")
    table.add_column("collective")
    for name in ("ranks", "size", "on", "median", "min", "algorithm GB/s", "bus GB/s", "copy GB/s", "bus/copy"):
        table.add_column(name, justify="right")
    shown = [record for record in rows(measurements) if record["collective"] != COPY]
    for record, following in zip_longest(shown, shown[1:]):
        ends = following is None or following["collective"] != record["collective"]
        table.add_row(
            str(record["collective"]),
            str(record["ranks"]),
            size_text(float(record["bytes"])),
            str(record["on"]),
            _time(float(record["median_seconds"])),
            _time(float(record["min_seconds"])),
            *(f"{float(record[name]) / 1e9:.3f}" for name in ("algorithm_bandwidth", "bus_bandwidth")),
            f"{float(record['copy_bandwidth']) / 1e9:.2f}",
            f"{float(record['share_of_copy']):.0%}",
            end_section=ends,
        )
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
