"""Format a time as a short text with a unit (`time_text`)."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def time_text(time: float, *, unit: str = "s") -> str:
    """Return seconds as text with a fitting unit (`12.5 ms`); with another `unit`, format `time` as a plain number."""
    if unit != "s":
        return f"{time:.4g}"
    if time == 0:
        return "0"
    scale, name = next(((scale, name) for scale, name in _UNITS if abs(time) >= scale), _UNITS[-1])
    return f"{time / scale:.4g} {name}"
