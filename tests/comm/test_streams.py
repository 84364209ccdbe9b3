"""Test streams of a device that runs every operation at once, and the interface to torch's generators."""

import pytest
import torch

from meshwise.comm.api.streams import generator_states, restore_generators, streams_of

CPU = torch.device("cpu")


def test_events_of_the_host_are_times_in_order() -> None:
    streams = streams_of(CPU)
    first, second = streams.mark(timing=True), streams.mark(timing=True)
    assert 0 <= first.elapsed_time(second) < 1000


def test_there_is_one_stream_and_nothing_to_wait_for() -> None:
    streams = streams_of(CPU)
    side = streams.create()
    assert side == streams.current()
    with streams.use(side):
        x = streams.host_empty([2, 3], dtype=torch.float64).fill_(1.0)
        streams.keep(x, stream=side)
    side.wait_event(streams.mark())
    side.synchronize()
    assert x.sum() == 6
    assert not x.is_pinned()
    assert streams.memory is None


def test_draws_are_repeated_from_kept_states() -> None:
    states = generator_states()
    drawn = torch.rand(3)
    restore_generators(states)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.rand(2, generator=streams_of(CPU).generator().manual_seed(1)), _seeded())


def _seeded() -> torch.Tensor:
    return torch.rand(2, generator=torch.Generator().manual_seed(1))


@pytest.mark.gpu
def test_a_side_stream_of_a_gpu_waits_for_an_event() -> None:
    streams = streams_of(torch.device("cuda", 0))
    side, x = streams.create(), torch.zeros(1 << 20, device="cuda")
    x += 1
    behind = streams.mark()
    with streams.use(side):
        side.wait_event(behind)
        total = x.sum()
    streams.current().wait_stream(side)
    streams.keep(total, stream=streams.current())
    assert total.item() == 1 << 20
