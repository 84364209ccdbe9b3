"""Run a function on the first rank alone, and return its result, or raise its error, on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.launch.rank_process import picklable

Result = TypeVar("Result")


def on_first_rank(
    call: Callable[[], Result], *, world: World, shared: tuple[type[Exception], ...] = (Exception,)
) -> Result:
    """Return the result of `call`, which runs on the first rank, on every rank (collective).

    Every rank raises an error of a class in `shared`. After any other error the other ranks raise RankLostError."""
    own: Exception | None = None
    outcome: tuple[Any, BaseException | None] = None, None
    if world.rank == 0:
        try:
            outcome = call(), None
        except Exception as error:  # noqa: BLE001 -- raised below, after the other ranks have received it
            own = error
            lost = RankLostError(f"rank 0 failed: {type(error).__name__}: {error}")
            outcome = None, picklable(error) if isinstance(error, shared) else lost
    result, sent = world.exchange(outcome)[0]
    if failed := own or sent:
        raise failed
    found: Result = result
    return found
