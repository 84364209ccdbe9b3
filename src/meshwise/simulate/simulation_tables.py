"""Turn predicted memory and time into text tables, for `meshwise simulate` and for error messages."""

from collections.abc import Mapping, Sequence

from meshwise.simulate.measured_ranks import MeasuredRank
from meshwise.simulate.memory_use import RankMemory, fullest
from meshwise.simulate.prediction import Prediction
from meshwise.simulate.step_tape import Category

Table = list[tuple[str, ...]]
"""Rows of cells; the first row has the titles."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_table(ranks: Sequence[RankMemory], *, measured: Sequence[MeasuredRank] = ()) -> Table:
    """Return each rank's peak memory along pp by category; if measured, with the measured peak and the error."""
    categories = [category for category in Category if any(rank.peak.device.get(category) for rank in ranks)]
    hosts = any(moment.host for rank in ranks for moment in rank.steady)
    tiers = [tier for tier in ("cpu", "disk") if any(rank.away.get(tier) for rank in ranks)]
    host = ["on the host"] if hosts or "cpu" in tiers else []
    titles = ("pp", *categories, "peak", "during", *host, *(["on disk"] if "disk" in tiers else []))
    rows: Table = [(*titles, "measured", "error") if measured else titles]
    for rank in ranks:
        peak = rank.peak
        cells = [
            str(rank.index),
            *(size_text(peak.device.get(category, 0)) for category in categories),
            size_text(peak.bytes),
        ]
        cells.append(peak.label)
        if host:
            most = max(sum(moment.host.values()) for moment in (*rank.first, *rank.steady))
            cells.append(size_text(most + rank.away.get("cpu", 0)))
        if "disk" in tiers:
            cells.append(size_text(rank.away.get("disk", 0)))
        if measured:
            most = max(one.peak for one in measured if one.index == rank.index)
            cells += [size_text(most), f"{100 * (peak.bytes / most - 1):+.1f} %"]
        rows.append(tuple(cells))
    return rows


def time_table(prediction: Prediction) -> Table:
    """Return rows of (title, value): seconds of a step, tokens per second, utilisation, bubble, waits, traffic, fit."""
    waits = sorted(prediction.exposed.items(), key=lambda item: -item[1])
    return [
        ("", ""),
        ("step", f"{prediction.seconds:.4g} s"),
        ("tokens/s", f"{prediction.tokens_per_second:,.0f}"),
        ("utilisation", f"{100 * prediction.utilisation:.1f} % of the peak, without recomputation"),
        ("bubble", f"{100 * prediction.bubble:.1f} % of the step"),
        *(
            (f"waits for {axes}", f"{100 * took / prediction.seconds:.1f} % of the step")
            for axes, took in waits
            if took
        ),
        *((f"sent {where}", size_text(size)) for where, size in prediction.traffic.items() if size),
        ("fits", "yes" if prediction.fits else "no: see --memory"),
    ]


def by_category(ranks: Sequence[RankMemory]) -> Mapping[str, int]:
    """Return the bytes by category at the peak of the rank with the largest peak."""
    return {str(category): size for category, size in fullest(ranks).peak.device.items()}


def size_text(size: float) -> str:
    """Return a size in bytes as text with a unit: `4.0 KiB` for 4096."""
    power = 0
    while abs(size) >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} {_UNITS[power]}" if power == 0 else f"{size:.1f} {_UNITS[power]}"
