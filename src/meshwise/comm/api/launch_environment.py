"""Read the launcher's environment variables: rank, world size, and where the ranks meet.

torchrun sets all of them. An incomplete set is refused: either the launcher was set up only in part, and each process
would run alone, or a variable was left over.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a rank needs. The last two are ignored without the first two, and for a rank that is alone."""

_OF_A_RANK = REQUIRED[:2]


@dataclass(frozen=True)
class LaunchedRank:
    """This process as a rank: its number and the world size."""

    rank: int
    size: int


def launched(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Return the rank that the environment describes, or None when this process is no rank. Raises ValueError when
    variables are missing or contradict each other.

    `environment`: by default the environment of this process.
    """
    variables = os.environ if environment is None else environment
    if not is_under_launcher(variables):
        return None
    if wrong := launch_error(variables):
        raise ValueError("; ".join(wrong))
    return LaunchedRank(int(variables["RANK"]), int(variables["WORLD_SIZE"]))


def is_under_launcher(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether any launcher variable is set, right or wrong."""
    variables = os.environ if environment is None else environment
    return any(variables.get(name) for name in _OF_A_RANK)


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of its ranks."""
    return bool(os.environ.get("RANK"))


def prints_for_job() -> bool:
    """Return whether this process prints messages for the whole job: the first rank, or a process that is no rank."""
    return not is_rank() or os.environ["RANK"] == "0"


def launch_error(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with the launcher's variables and what to change, or None when they are complete."""
    needed = _OF_A_RANK if environment.get("WORLD_SIZE") == "1" else REQUIRED
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        present = [name for name in _OF_A_RANK if environment.get(name)]
        return (
            f"{' and '.join(present)} {'is' if len(present) == 1 else 'are'} set, but not {', '.join(missing)}",
            f"start the ranks with torchrun, or set all of {', '.join(REQUIRED)}, or unset {' and '.join(present)}",
        )
    odd = [name for name in needed if name != "MASTER_ADDR" and not re.fullmatch("[0-9]{1,9}", environment[name])]
    if odd:
        named = ", ".join(f"{name}={environment[name]}" for name in odd)
        return f"not a whole number: {named}", "start the ranks with torchrun, which sets them"
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= size:
        return (
            f"RANK={rank} in a world of WORLD_SIZE={size}",
            f"number the ranks 0 to {size - 1}, or raise WORLD_SIZE on all of them" if size else "set it on all ranks",
        )
    return None
