"""Run a function on N ranks, as threads of this process or as processes."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from meshwise.comm import run as run_processes
from meshwise.comm.in_process.thread_world import run_threads


class RankRunner(Protocol):
    """Any object that runs ranks in its own way, such as processes that stay warm between calls."""

    def run(self, size: int, main: Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Return what `main(world, *args)` returned, by rank."""


def run(
    size: int,
    main: Callable[..., Any],
    *,
    on: Literal["threads", "processes"] | RankRunner = "threads",
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """Run `main(world, *args)` on `size` ranks and return what each returned, by rank.

    `on` is "threads" (starts in milliseconds, takes any callable), "processes" (starts in seconds; `main` stands at the
    top of a file, see `meshwise.run`), or a `RankRunner`. Raises the error of the first rank that failed, with a note
    that names the rank.
    """
    if on == "threads":
        return list(run_threads(size, main, args=args))
    if on == "processes":
        return run_processes(size, main, args=args)
    if isinstance(on, str):
        raise ValueError(  # noqa: TRY004 - a wrong word, of a type that may be
            f"on={on!r}: ranks run on 'threads', on 'processes', or on an object with a method `run`"
        )
    return on.run(size, main, args=args)
