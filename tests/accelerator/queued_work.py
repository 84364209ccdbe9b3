"""Queues of simulated devices: operations wait in streams and run as late, as early or as randomly as waits allow.

    | default stream     each operation runs when it is called; a wait runs the work that it waits for
    | other streams      copy ─ copy ─ …          `late`: an operation runs when a wait needs it. `early`: it runs as
    | NCCL's streams     all_reduce ─ send ─ …    soon as its own waits allow. `random`: by chance, in between

A collective is one `JointWork`: it runs when it has come to the front of its stream on every rank. Ranks that can never
get there are reported as a `Deadlock`, with the place of each rank's call."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from meshwise import comm
from meshwise.comm.in_process.thread_and_trace_worlds import Rendezvous, RunEnded
from meshwise.model.torch_private import without_dispatch_modes

_PATIENCE_SECONDS = 120.0
_CHANCE = 0.2
_SIMULATOR = tuple(f"{Path(__file__).parent}/{name}" for name in ("queued_work", "simulated_", "stream_races"))
_NOT_CALLERS = (*_SIMULATOR, f"{Path(torch.__file__).parent}/")
_TRANSPORT = f"{Path(comm.__file__).parent}/"


def place_of_call(*, transport: bool = True) -> str:
    """Return `folder/file:line function` of the innermost caller outside torch and the simulation.

    transport: False skips the folder `comm` of meshwise too."""
    frame = sys._getframe(1)
    skipped = _NOT_CALLERS if transport else (*_NOT_CALLERS, _TRANSPORT)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(maxsize=4096)
def _place(file: str, number: int, name: str) -> str:
    return f"{'/'.join(Path(file).parts[-2:])}:{number} {name}"


class Deadlock(RuntimeError):
    """Error for ranks that wait for each other, so that none can continue."""


class QueuedWork:
    """Operation of a stream: it runs after the works `after`, and a collective together with the other ranks' works."""

    def __init__(
        self, run: Callable[[], None], *, after: Sequence["QueuedWork"], text: str, joint: "JointWork | None" = None
    ) -> None:
        """`text`: the operation and the place of its call. `joint`: the collective to which the work belongs."""
        self.run: Callable[[], None] | None = run
        self.after = after
        self.text = text
        self.joint = joint
        self.done = False

    def finish(self) -> None:
        """Mark the work as done, and let go of its tensors."""
        self.done, self.run, self.after, self.joint = True, None, (), None


class JointWork:
    """Collective of several ranks: the work of each, by rank, and how to run it when all have called."""

    def __init__(self, ranks: Sequence[int], *, what: str) -> None:
        self.ranks = ranks
        self.what = what
        self.members: dict[int, QueuedWork] = {}
        self.run: Callable[[], None] = lambda: None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not called the collective."""
        return [rank for rank in self.ranks if rank not in self.members]


class WorkQueues:
    """Queues of all simulated devices of a run, and the ranks that wait for them.

    | timing   `late`, `early` or `random`: when the work of a stream runs, within the limits that waits set
    | seed     of the chances of `random`"""

    def __init__(self, rendezvous: Rendezvous, *, timing: str, seed: int) -> None:
        self._rendezvous = rendezvous
        self._timing = timing
        self.chances = random.Random(seed)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: dict[QueuedWork, None] = {}
        self._waiting: dict[int, JointWork] = {}
        self._finished: set[int] = set()

    def is_thread_of(self, rank: int) -> bool:
        """Return whether the thread that calls is that of a rank, and not one that the rank has started."""
        return threading.current_thread() is self._rendezvous.threads[rank]

    def post(self, work: QueuedWork, *, rank: int) -> None:
        """Add a work of a rank that is queued in its stream. Raises Deadlock if it can never run."""
        with self._lock:
            self._pending[work] = None
            if work.joint is not None:
                self.join(work.joint, work=work, rank=rank)
        self.pass_time()

    def join(self, joint: JointWork, *, work: QueuedWork, rank: int) -> None:
        """Add the call of a rank to a collective."""
        with self._lock:
            joint.members[rank] = work
            if not joint.missing:
                self._waiting = {other: one for other, one in self._waiting.items() if one is not joint}
                self._changed.notify_all()

    def pass_time(self) -> None:
        """Run queued work: none if late, all that can run if early, or some by chance."""
        if self._timing == "late":
            return
        with self._lock:
            for work in list(self._pending):
                if not work.done and (self._timing == "early" or self.chances.random() < _CHANCE):
                    self._try(work)

    def force(self, works: Sequence[QueuedWork], *, rank: int) -> None:
        """Run works of a rank and all that they wait for; block until other ranks have called what they need."""
        for work in works:
            while True:
                with self._lock:
                    joint = self._try(work)
                if joint is None:
                    break
                self.block(joint, rank=rank)

    def block(self, joint: JointWork, *, rank: int) -> None:
        """Block until all ranks have called a collective. Raises Deadlock, and RunEnded if another rank failed."""
        with self._lock:
            if not joint.missing:
                return
            if self.is_thread_of(rank):
                self._waiting[rank] = joint
                self._look_for_deadlock()
        self._rendezvous.turn.give()
        ends = time.monotonic() + _PATIENCE_SECONDS
        with self._lock:
            while joint.missing:
                if self._rendezvous.failure is not None:
                    raise RunEnded
                if time.monotonic() > ends:
                    raise Deadlock(f"rank {rank} has waited for {_PATIENCE_SECONDS:g} s:\n{self._report()}")
                self._changed.wait(0.05)
        self._rendezvous.turn.take()

    def finish(self, rank: int) -> None:
        """Mark a rank as finished. Raises Deadlock if another rank waits for it."""
        with self._lock:
            self._finished.add(rank)
            self._look_for_deadlock()

    def _try(self, target: QueuedWork) -> JointWork | None:
        """Run a work and all that it waits for. Return a collective that some ranks have not called, or None."""
        path: list[QueuedWork] = [target]
        while path:
            work = path[-1]
            if work.done:
                path.pop()
                continue
            if work.joint is not None and work.joint.missing:
                return work.joint
            members = [work] if work.joint is None else list(work.joint.members.values())
            before = next((each for one in members for each in one.after if not each.done), None)
            if before is None:
                self._run(members, work.joint)
            elif any(_unit(one) is _unit(before) for one in path):
                start = next(at for at, one in enumerate(path) if _unit(one) is _unit(before))
                raise Deadlock("queued operations wait for each other in a circle:\n" + _texts(path[start:]))
            else:
                path.append(before)
        return None

    def _run(self, members: Sequence[QueuedWork], joint: JointWork | None) -> None:
        run = members[0].run if joint is None else joint.run
        assert run is not None
        with without_dispatch_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            run()
        for one in members:
            self._pending.pop(one, None)
            one.finish()

    def _look_for_deadlock(self) -> None:
        gone = [joint for joint in self._waiting.values() if self._finished.intersection(joint.missing)]
        if gone or (self._waiting and len(self._waiting) + len(self._finished) == len(self._rendezvous.threads)):
            raise Deadlock(f"every rank waits for another, or for one that has finished:\n{self._report()}")

    def _report(self) -> str:
        """Return a line for each rank: the call it waits in, its place, and the ranks that have not called it."""
        lines = [f"  rank {rank} has finished" for rank in sorted(self._finished)]
        for rank, joint in sorted(self._waiting.items()):
            call = joint.members[rank].text if rank in joint.members else joint.what
            lines.append(f"  rank {rank} waits for {joint.missing} in {call}")
        return "\n".join(lines)


def _unit(work: QueuedWork) -> QueuedWork | JointWork:
    return work if work.joint is None else work.joint


def _texts(path: Sequence[QueuedWork]) -> str:
    lines = []
    for work in path:
        calls = {-1: work} if work.joint is None else work.joint.members
        lines += [f"  {'' if rank < 0 else f'rank {rank}: '}{each.text}" for rank, each in calls.items()]
    return "\n".join(lines)
