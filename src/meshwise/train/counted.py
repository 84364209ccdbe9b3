"""Numbers of things, as one says them."""


def counted(number: int, *, of: str) -> str:
    """`1 step`, `1,000 steps`."""
    return f"{number:,} {of}{'s' * (number != 1)}"
