"""What the turns of `peers.py` amount to: medians, paired ratios, and the table in the documentation."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contestants import PEERS, Contestant


@dataclass(frozen=True)
class Pair:
    """Two neighbouring turns, ours and one peer's, per step: wall seconds, processor seconds of all ranks together, and
    each rank's peak memory so far (MB)."""

    peer: str
    round_number: int
    ours_seconds: float
    peer_seconds: float
    ours_processor: float
    peer_processor: float
    ours_megabytes: tuple[float, ...]
    peer_megabytes: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """One peer against ours. `quartiles`: of the paired ratios of wall time ours/peer, lower, median, upper.
    `processor`: the median paired ratio of processor time."""

    peer: str
    stage: int
    pairs: int
    ours_seconds: float
    peer_seconds: float
    quartiles: tuple[float, float, float]
    processor: float
    ours_megabytes: float
    peer_megabytes: float


def summarise(pairs: Sequence[Pair]) -> list[Line]:
    """One line per peer that played, in the order of the contestants."""
    lines = []
    for peer in PEERS:
        played = [pair for pair in pairs if pair.peer == peer.name]
        if played:
            lines.append(_line(peer, played))
    return lines


def _line(peer: Contestant, played: Sequence[Pair]) -> Line:
    ratios = [pair.ours_seconds / pair.peer_seconds for pair in played]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Line(
        peer=peer.name,
        stage=peer.stage,
        pairs=len(played),
        ours_seconds=statistics.median(pair.ours_seconds for pair in played),
        peer_seconds=statistics.median(pair.peer_seconds for pair in played),
        quartiles=(lower, median, upper),
        processor=statistics.median(_ratio(pair.ours_processor, pair.peer_processor) for pair in played),
        ours_megabytes=max(max(pair.ours_megabytes) for pair in played),
        peer_megabytes=max(max(pair.peer_megabytes) for pair in played),
    )


def _ratio(ours: float, peer: float) -> float:
    """Not a number where the system does not tell processor times."""
    return ours / peer if peer else float("nan")


def markdown(lines: Sequence[Line], *, remarks: Sequence[str]) -> str:
    """The table, and under it what has to be said about it."""
    what = {peer.name: peer.what for peer in PEERS}
    rows = [
        "| ours | peer | its setting | our step, s | its step, s | ratio (quartiles) | processor | our MB | its MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        lower, median, upper = line.quartiles
        rows.append(
            f"| `zero={line.stage}` | {line.peer} | {what[line.peer]} | {line.ours_seconds:.3f} | "
            f"{line.peer_seconds:.3f} | **{median:.3f}** ({lower:.3f}–{upper:.3f}) | {line.processor:.3f} | "
            f"{line.ours_megabytes:.0f} | {line.peer_megabytes:.0f} |"
        )
    return "\n".join([*rows, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def write_between_markers(path: Path, *, text: str, table: str = "peers") -> None:
    """Replace what stands between a table's markers in `path`. Raises ValueError when the markers are not there."""
    begin, end = f"<!-- {table}: begin -->", f"<!-- {table}: end -->"
    whole = path.read_text()
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    if len(pattern.findall(whole)) != 1:
        raise ValueError(f"{path} needs the lines {begin} and {end}, once, where the table is to go")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}{end}", whole))


def machine() -> str:
    """Processor, cores, memory and system in one line; no names."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    processor = models[0] if models else platform.processor() or platform.machine()
    return (
        f"{processor}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()}, Python {platform.python_version()}"
    )
