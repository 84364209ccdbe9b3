"""Test that calls over an emulated link take the time of their formula, and no call along other axes does."""

import re
import threading

import pytest
import torch

from meshwise.attention.cp_attention import context_world
from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.world import EmulatedLink, World
from meshwise.plan import Plan
from meshwise.testing import run


def record(kind: str, size: int, *, axes: tuple[str, ...] = ("dp",)) -> CallRecord:
    return CallRecord(0, kind, axes, (size // 4,), "float32", size, "")


FORMULAS = [
    ("all_reduce", 4, 1.5, 4), ("all_gather", 4, 0.75, 2), ("reduce_scatter", 2, 0.5, 1), ("all_to_all", 8, 0.875, 3),
    ("gather", 4, 3.0, 2), ("broadcast", 4, 1.0, 2), ("send", 2, 1.0, 1), ("recv", 4, 1.0, 1),
]  # fmt: skip


@pytest.mark.parametrize("kind, ranks, share, hops", FORMULAS)
def test_a_call_takes_its_bytes_and_its_delays(kind: str, ranks: int, share: float, hops: int) -> None:
    link = EmulatedLink.parse("8Mbit 2ms")
    assert link.seconds(record(kind, 1_000_000), ranks=ranks) == pytest.approx((share, hops * 2e-3))


def test_a_link_of_one_axis_leaves_other_calls_alone() -> None:
    link = EmulatedLink.parse("1Gbit 2ms dp")
    assert link.seconds(record("send", 1000, axes=("tp",)), ranks=2) == (0.0, 0.0)
    assert link.seconds(record("send", 1000, axes=("dp", "tp")), ranks=2) == pytest.approx((8e-6, 2e-3))


@pytest.mark.parametrize("text", ["1Gbit", "fast", "0Mbit 1ms", "1Gbit2ms", "1 Gbit 2ms", "1Gbit 2ms DP!"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"emulate={text!r} is no bandwidth with a delay; write '1Gbit 2ms'")
    ):
        EmulatedLink.parse(text)


@pytest.mark.parametrize("plan", ["dp=4", "dp=2x2 zero=3", "dp=4 zero=3 hpz=2"])
def test_a_link_of_dp_is_a_link_of_the_axes_into_which_a_plan_divides_dp(plan: str) -> None:
    def main(world: World) -> list[float]:
        world.link = EmulatedLink.parse("8Mbit 1ms dp")
        mesh = Plan.parse(plan).mesh()
        assert world.over(mesh).link is world.link
        calls = [record("send", 1000, axes=(axis,)) for axis in (*mesh.expand(["dp"]), "tp")]
        return [world.link.seconds(call, ranks=2)[1] for call in calls]

    for *slow, free in run(4, main):
        assert set(slow) == {1e-3}
        assert free == 0.0


def test_a_link_of_cp_is_a_link_of_its_rings_and_heads() -> None:
    def main(world: World) -> frozenset[str]:
        world.link = EmulatedLink.parse("8Mbit 1ms cp")
        context_world(world, plan=Plan.parse("cp=4 context=usp cp_heads=2"))
        return world.link.axes

    assert run(4, main) == [{"cp", "ring", "heads"}] * 4


class Clock(threading.local):
    """Clock of one thread, which only its own sleep moves: no other work of the machine delays a rank."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_calls_wait_for_the_link_one_after_another_and_computation_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr("meshwise.comm.api.world.time", time)

    def main(world: World) -> list[float]:
        world.link = EmulatedLink.parse("8Mbit 10ms dp")
        ranks = world.over(Mesh((("dp", 2),)))
        x, y = torch.ones(12_500), torch.ones(12_500)  # 50 ms each
        times = []
        for pause in (0.0, 0.08):
            ranks.barrier()
            began = time.monotonic()
            works = [ranks.all_reduce(x, axes="dp"), ranks.all_reduce(y, axes="dp")]
            time.sleep(pause)
            for work in works:
                work.wait()
            times.append(time.monotonic() - began)
        assert float(x[0]) == 4.0
        return times

    for together, hidden in run(2, main):
        assert together == pytest.approx(0.12)
        assert hidden == pytest.approx(0.12)  # not 0.08 more
