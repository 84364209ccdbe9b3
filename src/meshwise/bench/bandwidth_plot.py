"""Draw the bus bandwidth over tensor size as a PNG: a panel per collective, a line per group size, the copy dashed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from meshwise.bench.bus_bandwidth import COPY, Measurement

_COLUMNS = 3


class MissingExtraError(ValueError):
    """Raised when an optional package is not installed; the message names the extra to install."""


def require_matplotlib() -> None:
    """Raise MissingExtraError if matplotlib is not installed. Commands call it before they measure."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("a PNG needs matplotlib: pip install 'meshwise[plot]'")


def plot(measurements: Sequence[Measurement], *, path: Path) -> None:
    """Draw the measurements on ordinary tensors as a PNG. Raises MissingExtraError without matplotlib, and OSError."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - of the extra `plot`
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    kinds = [kind for kind in dict.fromkeys(one.kind for one in measurements) if kind != COPY]
    figure = Figure(figsize=(4 * _COLUMNS, 3 * -(-len(kinds) // _COLUMNS)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, kind in enumerate(kinds):
        panel = figure.add_subplot(-(-len(kinds) // _COLUMNS), _COLUMNS, index + 1)
        for number, ranks in enumerate(sorted({one.ranks for one in measurements})):
            for drawn, style in ((kind, "o-"), (COPY, "--")):
                line = [one for one in measurements if (one.kind, one.ranks, one.on) == (drawn, ranks, "ordinary")]
                panel.plot(
                    [one.bytes for one in line],
                    [one.bus_bandwidth / 1e9 for one in line],
                    style,
                    color=f"C{number}",
                    markersize=3,
                    label=f"{ranks} ranks" + (", copy" if drawn == COPY else ""),
                )
        panel.set_title(kind)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("bytes")
        panel.set_ylabel("bus bandwidth, GB/s")
        panel.grid(visible=True, alpha=0.3)
        if index == 0:
            panel.legend(fontsize="x-small")
    figure.savefig(path, dpi=120, format="png")
