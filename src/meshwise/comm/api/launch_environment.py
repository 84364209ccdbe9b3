"""Read and check the launcher's environment variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun sets all four. An incomplete set is an error: each process would otherwise run alone, as a world of one rank.
"""

import os
import re
from collections.abc import Mapping

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a rank needs. If WORLD_SIZE is 1, or if no rank is set, MASTER_ADDR and MASTER_PORT are not used."""

_OF_A_RANK = REQUIRED[:2]


def launched_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (rank, world size) of the environment, or None when neither RANK nor WORLD_SIZE is set.
    `environment`: by default the environment of this process. Raises ValueError when variables are missing or wrong."""
    variables = os.environ if environment is None else environment
    if not is_under_launcher(variables):
        return None
    if wrong := launch_error(variables):
        raise ValueError("; ".join(wrong))
    return int(variables["RANK"]), int(variables["WORLD_SIZE"])


def is_under_launcher(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether RANK or WORLD_SIZE is set, to any value. `environment`: by default this process's."""
    variables = os.environ if environment is None else environment
    return any(variables.get(name) for name in _OF_A_RANK)


def is_rank() -> bool:
    """Return whether RANK is set in the environment of this process."""
    return bool(os.environ.get("RANK"))


def prints_for_job() -> bool:
    """Return whether this process prints the messages of the job: True on rank 0, and in a process without a rank."""
    return not is_rank() or os.environ["RANK"] == "0"


def launch_error(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the error in the launcher's variables and the remedy, or None when the variables are correct."""
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
