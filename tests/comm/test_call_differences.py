"""Test that differing last calls of a group are reported at close, even if no rank needed data of another."""

from __future__ import annotations

import uuid

import pytest
import torch

from joined_worlds import joined
from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallLine, CallRecord, PlacedCall, RanksDisagree
from meshwise.comm.api.world import World, raise_difference
from meshwise.testing import run
from script_processes import ended_ranks
from warm_processes import Processes

pytestmark = pytest.mark.processes

MESH = Mesh.of(dp=2, tp=2)


def _call(world: World, name: str, kind: str) -> None:
    other = joined(world, name, "shared memory")
    x, over = torch.full((8,), float(world.rank)), other.over(MESH)
    if kind == "broadcast":
        over.broadcast(x, axes="tp", source=over.group("tp").index).wait()
    elif world.rank == 2:
        over.broadcast(x, axes="tp", source=0).wait()
    other.close()


@pytest.mark.parametrize(
    "kind, told",
    [
        ("broadcast", r"ranks 0,1 called different.*\n +rank 0 +#0 broadcast\[tp\] from 0 8.*\n +rank 1 +#0.*from 1 8"),
        ("one more", r"have made different numbers of calls.*: rank 2 1, rank 3 0; the last of rank 2 is #0 broad"),
    ],
)
def test_a_last_call_that_differs_is_reported_at_the_end(processes: Processes, kind: str, told: str) -> None:
    with pytest.raises(RanksDisagree, match=told):
        run(4, _call, on=processes, args=(uuid.uuid4().hex, kind))


def test_calls_that_are_no_longer_kept_are_reported() -> None:
    line = CallLine((0, 1))
    last = PlacedCall(CallRecord(5, "barrier", ("rank",), (), "", 0, "here"), line, 5)
    with pytest.raises(RanksDisagree, match="different collectives, whose records are no longer kept"):
        raise_difference({rank: ([last], {line: 6}) for rank in line.ranks})
    with pytest.raises(RanksDisagree, match="rank 0 6, rank 1 5; the last of rank 0 is long ago"):
        raise_difference({0: ([], {line: 6}), 1: ([], {line: 5})})


LEAVES_IT_TO_THE_EXIT = """
import torch, meshwise
from meshwise.base.mesh import Mesh
over = meshwise.connect(device="cpu").over(Mesh.of(tp=2))
over.broadcast(torch.ones(8), axes="tp", source=over.group("tp").index).wait()
"""


def test_ranks_that_close_at_their_exit_end_with_an_error() -> None:
    ranks = ended_ranks(LEAVES_IT_TO_THE_EXIT, size=2)
    assert [status for status, _, _ in ranks] == [1] * 2
    told = "".join(errors for _, _, errors in ranks)
    assert "ranks 0,1 called different collectives where they have to call the same" in told
