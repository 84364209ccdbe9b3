"""Sizes in bytes as people write them: 4K, 64M, 1.5G, in powers of 1024."""

import re
from collections.abc import Mapping

_UNITS: Mapping[str, int] = {"": 0, "K": 1, "M": 2, "G": 3}
_MOST = 2**50
"""More than any memory holds."""


def parse_size(text: str) -> int:
    """Return bytes of `4096`, `4K`, `4KB` or `4KiB` (all the same). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * 1024 ** _UNITS[match[2].upper()] if match else 0
    if not 1 <= size <= _MOST:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M or G: 4K, 64M")
    return int(size)


def size_text(size: float) -> str:
    """`4 KiB` for 4096: the largest unit that leaves at least 1, with three digits, or all before the point."""
    power = 0
    while round(size) >= 1024 and power < 3:
        size, power = size / 1024, power + 1
    digits = f"{size:.3g}" if size < 999.5 else f"{size:.0f}"
    return f"{digits} {['B', 'KiB', 'MiB', 'GiB'][power]}"
