"""Format a time as a short text with a unit (`time_text`)."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def time_text(time: float, *, unit: str = "s") -> str:
    """Return a time in seconds with a fitting unit, as in `12.5 ms`. With another `unit`, return only the number."""
    if unit != "s":
        return f"{time:.4g}"
    if time == 0:
        return "0"
    scale, name = next(((scale, name) for scale, name in _UNITS if abs(time) >= scale), _UNITS[-1])
    return f"{time / scale:.4g} {name}"
