"""Run a function on N ranks, as threads of this process or as processes."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from meshwise.comm import run as run_processes
from meshwise.comm.in_process.thread_world import run_threads


class RankRunner(Protocol):
    """Protocol of an object that runs ranks in its own way, such as in processes that it reuses between calls."""

    def run(self, size: int, main: Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call `main(world, *args)` on `size` ranks, and return the results by rank."""


def run(
    size: int,
    main: Callable[..., Any],
    *,
    on: Literal["threads", "processes"] | RankRunner = "threads",
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """Call `main(world, *args)` on `size` ranks, and return the results by rank.

    `on` is "threads" (starts in milliseconds, takes any callable), "processes" (starts in seconds; `main` must be at
    the top level of a module, see `meshwise.run`), or a `RankRunner`. Raises the error of the first rank that failed,
    with a note that names the rank, and ValueError for another `on`."""
    if on == "threads":
        return list(run_threads(size, main, args=args))
    if on == "processes":
        return run_processes(size, main, args=args)
    if isinstance(on, str):
        raise ValueError(  # noqa: TRY004 - the type is allowed, the value is not
            f"on={on!r}: ranks run on 'threads', on 'processes', or on an object with a method `run`"
        )
    return on.run(size, main, args=args)
