"""Define the colours of pictures, for light and dark screens, and write them as CSS (`style`)."""

from collections.abc import Mapping

COLORS: Mapping[str, tuple[str, str]] = {
    # what a rank computes; every second stage of a rank in a lighter tone
    "forward": ("#6a9fe0", "#5b93d8"),
    "forward-2": ("#a9c9f2", "#8db6ea"),
    "backward": ("#62b384", "#56a878"),
    "backward-2": ("#a5d6b8", "#8ccba5"),
    "input": ("#4fb3b9", "#47a7ad"),
    "input-2": ("#9ad6d9", "#82c9cd"),
    "weights": ("#e3b341", "#d9a93a"),
    "weights-2": ("#f0d591", "#e8cb80"),
    "update": ("#9b7fd4", "#9277cf"),
    "between": ("#b9b2c9", "#6d6780"),
    "wait": ("#e2645a", "#e46a60"),
    "collective": ("#8390a5", "#7c899f"),
    "message": ("#c28f5c", "#b58453"),
    "tier": ("#c06fa5", "#b5669a"),
    # what memory is for
    "parameters": ("#5585cf", "#5b8ad6"),
    "gathered": ("#9fc2ef", "#8fb6e8"),
    "gradients": ("#62b384", "#56a878"),
    "optimizer": ("#9b7fd4", "#9277cf"),
    "reduction": ("#7fa6a0", "#6f9993"),
    "activations": ("#eda34f", "#e29a48"),
    "staging": ("#c06fa5", "#b5669a"),
    "communication": ("#8390a5", "#7c899f"),
    # nodes, one after the other
    "node-0": ("#bcd4f5", "#2f4d78"),
    "node-1": ("#c6e6d2", "#2c5a41"),
    "node-2": ("#f6dfae", "#66501c"),
    "node-3": ("#dccdf3", "#4b3a73"),
    "node-4": ("#f5c8c3", "#733a34"),
    "node-5": ("#c3e5e7", "#255659"),
    # lines, letters and grounds
    "ink": ("#1d232c", "#e6e9ee"),
    "inside": ("#10203a", "#0b1220"),
    "faint": ("#5d6673", "#a2abb8"),
    "grid": ("#e3e6eb", "#2a3038"),
    "ground": ("#ffffff", "#14181e"),
    "row": ("#f5f6f8", "#1b2027"),
    "limit": ("#c9372c", "#ff7d72"),
}
"""Colours (on a light, on a dark screen) by paint: a paint is the name of a colour. `UNSEEN` has none."""
UNSEEN = "gap"
"""Paint of invisible bars, which show their name when pointed at."""
LINES = frozenset({"grid", "limit", "faint", "ink"})
"""Paints in which lines are drawn."""


def style() -> str:
    """Return the CSS of all paints: a class for each, with variables for its light and its dark colour."""
    light = "".join(f"--{paint}:{colors[0]};" for paint, colors in COLORS.items())
    dark = "".join(f"--{paint}:{colors[1]};" for paint, colors in COLORS.items())
    fills = "".join(f".picture .{paint}{{fill:var(--{paint})}}" for paint in COLORS)
    lines = "".join(f".picture .line.{paint}{{fill:none;stroke:var(--{paint})}}" for paint in sorted(LINES))
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{fills}\n{lines}\n"
        ".picture .bars{stroke:var(--ground);stroke-width:.5;vector-effect:non-scaling-stroke}\n"
        ".picture .plot:not(.near) .fine{stroke:none}\n"
        f".picture .{UNSEEN}{{fill:transparent;stroke:none}}\n"
        ".picture .line{stroke-width:1;vector-effect:non-scaling-stroke}.picture .line.limit{stroke-dasharray:5 4}\n"
        ".picture text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;dominant-baseline:central}\n"
    )
