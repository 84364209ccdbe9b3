"""Whether the ranks can communicate."""

from collections.abc import Mapping

import pytest
from torch import Tensor

from meshwise.bench.doctor import PairMessages, exchange_messages
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.world import Group, Work, World
from meshwise.comm.in_process.thread_and_trace_worlds import ThreadWorld, run_threads
from warm_processes import Processes


def test_ranks_that_can_communicate_find_nothing_and_agree_about_every_link() -> None:
    first, *others = run_threads(3, exchange_messages)

    assert first.findings == ()
    assert [link.ranks for link in first.links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in first.links)
    assert all(other.findings == () and [link.ranks for link in other.links] for other in others)


@pytest.mark.processes
def test_processes_can_communicate(processes: Processes) -> None:
    exchange = processes.run(2, exchange_messages)[0]
    assert isinstance(exchange, PairMessages)
    assert exchange.findings == ()
    assert 1e-7 < exchange.links[0].latency < 1
    assert 1e6 < exchange.links[0].bandwidth < 1e12


class _Garbles(ThreadWorld):
    """Rank 1 sends something else."""

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        if record.kind == "send" and self.rank == 1:
            give = {to: x + 1 for to, x in give.items()}
        return super()._move(record, group, give, take)


def test_what_arrives_wrong_is_named_on_every_rank() -> None:
    def main(world: World) -> PairMessages:
        assert isinstance(world, ThreadWorld)
        return exchange_messages(_Garbles(world.rendezvous, rank=world.rank, mesh=world.mesh))

    for exchange in run_threads(3, main):
        assert [finding.what for finding in exchange.findings] == [
            f"a message from rank 1 to rank {to} arrived with changed bytes" for to in (0, 2)
        ]
