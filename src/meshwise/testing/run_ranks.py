"""`run`: the same function on N ranks, as threads of this process or as processes joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from meshwise.comm.in_process.thread_world import run_threads
from meshwise.testing.processes import Processes


def run(
    size: int,
    main: Callable[..., Any],
    *,
    on: Literal["threads", "processes"] | Processes = "threads",
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """`main(world, *args)` on `size` ranks; what each returned, by rank.

    on: "threads" (milliseconds, any callable), a `Processes` whose ranks stay warm between calls, or "processes" for
    ranks that end with the call. Raises the error of the first rank that failed; a note says which rank it was.
    """
    if on == "threads":
        return list(run_threads(size, main, args=args))
    if isinstance(on, Processes):
        return on.run(size, main, args=args)
    if on == "processes":
        with Processes() as processes:
            return processes.run(size, main, args=args)
    raise ValueError(f"on={on!r}: ranks run on 'threads', on 'processes', or on a Processes")
