"""Let separate jobs meet at a store, sum tensors in rounds, and apply the sums of a round together or not at all.

`meshwise meet` has the store. Rank 0 of a job reads and writes it, and shares the result with its ranks. A round takes
one attempt, or more after failures. The first writer of a key of attempt n wins:

    | a job comes                         n/entry/i      its ticket, and the committed rounds that its state includes
    | all have come, or time is over      n/members      the entries that take part; who comes later does not
    | a member has the sums               n/done/ticket
    | the last member has them            n/decision     commit: each member applies the sums
    | a member has failed, or was lost    n/decision     retry: no member applies them

Every job counts heartbeats at the store. docs/local_steps.md has what a job waits for, and how long ("Jobs that join").

Members sum if their state includes all committed rounds. The others join: when the sums are applied, they copy the
state of the source, the heaviest of the members that sum. Without any, the member with the most steps is the source."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshwise.base.mesh import Mesh
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.network.gloo_world import GlooTransport, GlooWorld
from meshwise.comm.network.job_store import store_of
from meshwise.plan import PlanError

_POLL_SECONDS = 0.02
_SHARE_SECONDS = 5.0  # a rank that waits longer for rank 0 would be reported by its watchdog
_NO_STORE = "no store of joined jobs at {} ({}); start meshwise meet there, and the jobs with --train.resume auto"
Found = TypeVar("Found")


class JobEntry(NamedTuple):
    """A job that has come to an attempt. `ticket`: number of this start of the job. `size`: elements that it sums.

    `rounds`: committed rounds that its state includes; -1: none. `weight`: count of its losses in the round."""

    ticket: int
    place: str
    rounds: int
    steps: int
    weight: float
    size: int

    def __str__(self) -> str:
        return f"job {self.ticket} ({self.place})"


class Membership(NamedTuple):
    """The members of an attempt: those that sum, the source first, and those that join. `rounds`: committed before."""

    attempt: int
    rounds: int
    summing: list[JobEntry]
    joining: list[JobEntry]
    dropped: list[JobEntry]

    @classmethod
    def parse(cls, text: bytes) -> "Membership":
        """Return the membership that a JSON text has."""
        attempt, rounds, *jobs = json.loads(text)
        return cls(attempt, rounds, *([JobEntry(*one) for one in each] for each in jobs))


class JoinedJobs:
    """One of several jobs that train together. Each rank of the job makes one; all ranks call its methods."""

    def __init__(
        self, address: str, *, world: World, lane: int | None, patience: float, least: int, facts: Mapping[str, str]
    ) -> None:
        """`lane`: number that one rank of each job has, which exchange tensors; None: this rank exchanges none.

        `least`: jobs that must come before a training begins. `facts`: values that must be equal in all jobs."""
        self._address, self._world, self._lane = address, world, lane
        self._patience, self._limit, self._least, self._facts = patience, timedelta(seconds=patience), least, facts
        self.rounds = -1
        """Number of committed rounds that the state of this job includes; -1: it has to join."""
        self._ticket = 0
        self._first_beats: dict[int, int] = {}
        self._ended = threading.Event()
        self._transports = contextlib.ExitStack()
        weakref.finalize(self, self._ended.set)

    def meet(self, totals: Sequence[Tensor], *, steps: int, weight: float) -> tuple[Membership, JobEntry]:
        """Take part in a round, and return its members and this job among them, when the round is committed.

        If this job sums, `totals` then have the sums, on ranks with a lane. Raises PlanError if facts differ,
        RankLostError without a store."""
        place, size = f"{socket.gethostname()}, process {os.getpid()}", sum(total.numel() for total in totals)
        while True:
            found, own = self._shared(self._came(JobEntry(self._ticket, place, self.rounds, steps, weight, size)))
            self._transports.close()  # every member has come, so none uses the last round's
            sums = [total.clone() for total in totals]

            def add_up(found: Membership = found, own: JobEntry = own, sums: Sequence[Tensor] = sums) -> None:
                peers = self._connect(found.summing, own, f"{found.attempt}/sums")
                for total in sums:
                    peers.all_reduce(total, axes="job").wait()

            problem = self._problem_of(add_up if own in found.summing else None)
            failed = bool(problem) if own in found.summing else None
            if self._shared(self._decided(found, failed=failed)) == "commit":
                break
            self._transports.close()
            self._say(f"round {found.rounds} is tried again: {problem or 'another job has failed'}")
        for total, result in zip(totals, sums, strict=True):
            total.copy_(result)
        for verb, jobs in (("continues without", found.dropped), ("is joined by", found.joining)):
            if jobs:
                self._say(f"round {found.rounds} {verb} {', '.join(map(str, jobs))}")
        self.rounds = found.rounds + 1 if own in found.summing else -1
        return found, own

    def copied(self, values: Sequence[Any], *, found: Membership, own: JobEntry) -> list[Any]:
        """Send picklable values from the source to the members that join; return them there, on ranks with a lane.

        If that fails, the members that join have to come to the next round."""
        received, members = list[Any](), [found.summing[0], *found.joining]

        def copy() -> None:
            peers = self._connect(members, own, f"{found.attempt}/state")
            for number in range(peers.exchange(len(values))[0]):
                received.extend(peers.exchange(values[number] if values else None)[:1])

        if problem := self._problem_of(copy if found.joining and own in members else None):
            self._say(f"the copy of the state has failed: {problem}")
        elif own in found.joining:
            self.rounds = found.rounds + 1
        return received

    def close(self) -> None:
        """Leave the other jobs, which do not wait for this one from now on."""
        self._ended.set()
        self._transports.close()

    # ---- within the job -----------------------------------------------------------------------------------------

    def _problem_of(self, talk: Callable[[], None] | None) -> str:
        """Run `talk` with other jobs on the ranks with a lane; return why it failed on a rank of this job, or "".

        Meanwhile the ranks meet every few seconds, so that no watchdog takes a long transfer for a hang."""
        errors: list[Exception] = []

        def run() -> None:
            self._world.streams.select()
            try:
                if talk is not None and self._lane is not None:
                    talk()
            except Exception as error:  # noqa: BLE001 - the rank's own thread raises it
                errors.append(error)

        thread = threading.Thread(target=run, name="meshwise jobs", daemon=True)
        thread.start()
        busy = True
        while busy:
            thread.join(_SHARE_SECONDS)
            busy = any(self._world.exchange(thread.is_alive()))
        for error in errors:
            if not isinstance(error, RankLostError):
                raise error
        return str(max(self._world.exchange("".join(map(str, errors)))))

    def _shared(self, talk: Iterator[Found | None]) -> Found:
        """Return the first value other than None that rank 0 gets from `talk`, or raise its error, on every rank."""
        while True:
            value: tuple[Found | None, Exception | None] = None, None
            if self._world.rank == 0:
                try:
                    value = next(talk), None
                except (PlanError, RuntimeError, OSError) as error:  # torch's store raises RuntimeError
                    lost = _NO_STORE.format(self._address, str(error).partition("\n")[0])
                    value = None, error if isinstance(error, PlanError) else RankLostError(lost)
            found, failed = self._world.exchange(value)[0]
            if failed is not None:
                raise failed
            if found is not None:
                return found  # type: ignore[no-any-return] # of an exchange

    def _until(self, look: Callable[[], tuple[Found | None, object]]) -> Generator[None, None, Found | None]:
        """Return the value that `look` finds; None if its signs of life do not change for `patience` seconds."""
        last, since, shared = object(), time.monotonic(), time.monotonic()
        while True:
            (found, signs), now = look(), time.monotonic()
            if found is not None or (signs == last and now - since > self._patience):
                return found
            if signs != last:
                last, since = signs, now
            if now - shared > _SHARE_SECONDS:
                shared = now
                yield
            time.sleep(_POLL_SECONDS)

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            sys.stderr.write(f"meshwise: {text}\n")

    def _connect(self, members: Sequence[JobEntry], own: JobEntry, name: str) -> World:
        """Return a world of the ranks of this lane in some members, in their order, along the axis `job`."""
        index, size, transport = members.index(own), len(members), None
        if size > 1:
            host = self._address.rpartition(":")[0]
            try:
                store = PrefixStore(f"{name}/{self._lane}", self._store)
                transport = GlooTransport(store, rank=index, size=size, towards=host, limit=self._limit)
            except (RuntimeError, OSError) as error:
                raise RankLostError(f"the jobs cannot connect: {error}".partition("\n")[0]) from error
            self._transports.callback(transport.close)
        return GlooWorld(rank=index, mesh=Mesh.of(job=size), device=self._world.device, transport=transport)

    # ---- at the store -------------------------------------------------------------------------------------------

    @cached_property
    def _store(self) -> Store:
        host, _, port = self._address.rpartition(":")
        return PrefixStore("meshwise/jobs", store_of(host, port=int(port), opens=False, timeout=self._limit))

    def _enter(self) -> None:
        """Take a ticket, compare the facts with the first job's, and start the heartbeat."""
        ticket = self._store.add("tickets", 1)
        first = json.loads(self._store.compare_set("facts", "", json.dumps(dict(self._facts))))
        for name, own in self._facts.items():
            if own != first.get(name):
                raise PlanError(
                    f"jobs that join need equal values of {name}: this job has {own}, the first one {first.get(name)}. "
                    "Change this job, or let it meet others elsewhere: meshwise meet --port 29401"
                )
        self._ticket = ticket
        given = self._store.clone(), f"alive/{ticket}", self._ended, min(1.0, self._patience / 4)  # type: ignore[attr-defined]
        threading.Thread(target=_beat, args=given, name="meshwise heartbeat", daemon=True).start()
        self._say(f"waits at {self._address} for {self._least} jobs, or for the end of a round of theirs")

    def _read(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def _heartbeats(self, jobs: Iterable[JobEntry]) -> list[int]:
        return [self._store.add(f"alive/{one.ticket}", 0) for one in jobs]

    def _lives(self, job: JobEntry) -> bool:
        """Return whether a job is this one, or its heart has beaten since this job first looked."""
        [beats] = self._heartbeats([job])
        return job.ticket == self._ticket or beats > self._first_beats.setdefault(job.ticket, beats)

    def _came(self, own: JobEntry) -> Iterator[tuple[Membership, JobEntry] | None]:
        """Come to attempts until this job is a member of one; yield the members, and this job's entry among them."""
        if not self._ticket:
            self._enter()
        own = own._replace(ticket=self._ticket)
        while True:
            attempt, before, rounds = int(self._read("attempt") or 0), Membership(-1, 0, [], [], []), 0
            while self._read(f"{attempt}/decision"):
                attempt += 1
            if attempt:
                before = Membership.parse(self._store.get(f"{attempt - 1}/members"))
                rounds = before.rounds + (self._store.get(f"{attempt - 1}/decision") == b"commit")
            self._store.set(f"{attempt}/entry/{self._store.add(f'{attempt}/count', 1)}", json.dumps(own))
            look = partial(self._gathered, attempt, rounds, before)
            found = (yield from self._until(look)) or look(over=True)[0]
            assert found is not None
            if own in found.summing + found.joining:
                yield found, own
            yield from (None for decision in self._decided(found, failed=None) if decision is None)

    def _gathered(
        self, attempt: int, rounds: int, before: Membership, *, over: bool = False
    ) -> tuple[Membership | None, object]:
        """Return the members of an attempt; or None and the signs of life, if more jobs are expected and not `over`."""
        if (text := self._read(f"{attempt}/members")) is None:
            keys = (f"{attempt}/entry/{n}" for n in range(1, self._store.add(f"{attempt}/count", 0) + 1))
            entries = [JobEntry(*json.loads(text)) for text in map(self._read, keys) if text]
            if not rounds:
                entries = [one for one in entries if self._lives(one)]
            entries.sort(key=lambda one: (one.rounds != rounds, -one.steps, -one.weight, one.ticket))
            here = {one.ticket for one in entries}
            missing = [one for one in before.summing + before.joining if one.ticket not in here]
            # A job whose optimizer has no state yet sums fewer elements: it has made no update, and joins.
            able = [one for one in entries if (one.rounds, one.size) == (rounds, entries[0].size)]
            if not rounds and len(entries) < self._least:
                return None, time.monotonic()
            if missing and not over:
                return None, [] if able and not before.joining else self._heartbeats(missing)
            summing = able or entries[:1]
            closed = Membership(attempt, rounds, summing, [one for one in entries if one not in summing], missing)
            text = self._store.compare_set(f"{attempt}/members", "", json.dumps(closed))
        return Membership.parse(text), None

    def _decided(self, found: Membership, *, failed: bool | None) -> Iterator[str | None]:
        """Yield the decision about an attempt. `failed`: whether this job's sums have failed; None: it has none."""
        key, done = f"{found.attempt}/decision", f"{found.attempt}/done"
        decision = "retry" if failed else None
        if failed is False:
            self._store.set(f"{done}/{self._ticket}", "")
            decision = "commit" if self._store.add(done, 1) == len(found.summing) else None

        def look() -> tuple[bytes | None, object]:
            busy = (one for one in found.summing if not self._store.check([f"{done}/{one.ticket}"]))
            return self._read(key), self._heartbeats(busy)

        if decision is None:
            yield from self._until(look)
        made = self._store.compare_set(key, "", decision or "retry").decode()
        self._store.set("attempt", str(found.attempt + 1))  # at which a new job begins to look
        yield made


def _beat(store: Store, key: str, ended: threading.Event, every: float) -> None:
    """Count heartbeats. `store`: a connection of its own, on which no other call waits."""
    with contextlib.suppress(RuntimeError):  # the main thread reports a lost store
        while not ended.wait(every):
            store.add(key, 1)
