"""Chains of collectives: every step in the order of the chains, whoever is waited for, and whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.progress import Progress
from meshwise.comm.api.world import Group, Work
from meshwise.comm.in_process.trace_world import TraceWorld
from meshwise.comm.network.chained_collectives import ChainedCollectives

WORLD = TraceWorld(rank=0, mesh=Mesh.of(rank=2))
STAMP = CallRecord(0, "all_reduce", ("rank",), (), "", 0, "")
GROUP = Group(("rank",), (0, 1), 0)


class Pending(Work):
    """A call that is complete when somebody says so, or when it is waited for."""

    def __init__(self) -> None:
        super().__init__(WORLD, stamp=STAMP)
        self.complete = False

    @property
    def ready(self) -> bool:
        return self.complete

    def _finish(self) -> None:
        self.complete = True


class Recorder:
    """Chains of named steps. `called`: the steps in the order in which they were called."""

    def __init__(self) -> None:
        self.chains = ChainedCollectives()
        self.called: list[str] = []
        self.pending: dict[str, Pending] = {}

    def begin(self, name: str, *, steps: int = 3, group: Group = GROUP) -> Work:
        def calls() -> Iterator[Work]:
            for step in range(1, steps + 1):
                self.called.append(f"{name}{step}")
                self.pending[f"{name}{step}"] = Pending()
                yield self.pending[f"{name}{step}"]

        return self.chains.begin(calls(), world=WORLD, stamp=STAMP, group=group)

    def complete(self, *names: str) -> Progress:
        for name in names:
            self.pending[name].complete = True
        return self.chains.progress()

    def order_of(self, step: int) -> Sequence[str]:
        return [name[0] for name in self.called if name.endswith(str(step))]


def test_the_first_step_is_called_at_once_and_the_others_when_the_one_before_is_complete() -> None:
    recorder = Recorder()
    recorder.begin("a")
    recorder.begin("b")
    assert recorder.called == ["a1", "b1"]
    assert recorder.complete("b1") is Progress.LATER
    assert recorder.called == ["a1", "b1"], "b is not called before a"
    assert recorder.complete("a1") is Progress.DID
    assert recorder.called == ["a1", "b1", "a2", "b2"]


def test_a_chain_without_its_step_still_waits_for_the_step_of_the_chain_before() -> None:
    recorder = Recorder()
    recorder.begin("a")

    def calls() -> Iterator[Work]:
        yield Work()
        recorder.called.append("b2")
        yield Work()

    recorder.chains.begin(calls(), world=WORLD, stamp=STAMP, group=GROUP)
    recorder.chains.progress()
    assert recorder.called == ["a1"]
    recorder.complete("a1")
    assert recorder.called == ["a1", "a2", "b2"]


def test_waiting_for_the_last_calls_every_step_in_the_order_of_the_chains() -> None:
    recorder = Recorder()
    works = [recorder.begin(name) for name in "abc"]
    works[2].wait()
    assert [recorder.order_of(step) for step in (1, 2, 3)] == [["a", "b", "c"]] * 3
    for work in works:
        work.wait()
    assert len(recorder.called) == 9


def test_groups_and_purposes_do_not_wait_for_each_other() -> None:
    recorder = Recorder()
    recorder.begin("a")
    recorder.begin("b", group=Group(("rank",), (0, 1), 0, "check"))
    recorder.begin("c", group=Group(("rank",), (0, 2), 0))
    recorder.complete("b1", "c1")
    assert recorder.called == ["a1", "b1", "c1", "b2", "c2"]


def test_what_nobody_waits_for_is_finished_in_the_end() -> None:
    recorder = Recorder()
    recorder.begin("a")
    recorder.begin("b")
    recorder.chains.finish()
    assert len(recorder.called) == 6
    assert recorder.chains.progress() is Progress.NOTHING


def test_an_error_is_raised_by_every_wait_and_nothing_passes_for_complete() -> None:
    def calls() -> Iterator[Work]:
        yield Work()
        raise OSError("gone")

    recorder = Recorder()
    before = recorder.begin("a", steps=1)
    failing = recorder.chains.begin(calls(), world=WORLD, stamp=STAMP, group=GROUP)
    after = recorder.begin("b")
    recorder.pending["a1"].complete = True
    with pytest.raises(OSError, match="gone"):
        recorder.chains.progress()
    before.wait()
    for work in (failing, after, failing):
        with pytest.raises(OSError, match="gone"):
            work.wait()
