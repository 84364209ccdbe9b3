"""Test that the host waits for a simulated accelerator once in a step: when it reads the step's totals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import pytest

from accelerator.simulated_accelerators import SimulatedAccelerators
from accelerator.simulated_streams import SimulatedStreams
from accelerator.training import batches, model_of, options, parsed
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.reference import next_token_loss
from meshwise.testing import run

READS_TOTALS = {"api/world.py totals": 1}

# Further waits: of a step whose sizes or work depend on values (MAY_WAIT of house_rules.py names the same places).
PACKED = {"attention/token_interception.py _answer": 2}
"""Tokens are looked at once for each integer tensor of the batch: a packed batch is dealt out otherwise."""
EXPERTS = {
    "expert/token_exchange.py _counted": 2,
    "expert/token_exchange.py _routed": 4,
    "reference/mixture_gpt.py _products": 4,
}
"""The sizes of messages, and of the experts' parts, of two mixtures."""
VALID = {"core/vocab_parallel.py require_valid": 1}
"""A device-side assertion on a GPU. Inside an autograd function a simulated device calls itself the CPU."""
SETTLED = {"memory/tiers.py settle": 6}
"""The optimizer runs on the CPU: three times, two directions of copies have to be over."""


def waits(world: World, text: str) -> Mapping[str, int]:
    """Return how often each function waited for the device in a step, after two steps in which torch learns shapes."""
    plan, streams = parsed(text), world.streams
    assert isinstance(streams, SimulatedStreams)
    trainer = parallelize(model_of(plan), plan, loss=next_token_loss, world=world, options=options(plan), lr=1e-2)
    for _ in range(3):
        streams.waits.clear()
        trainer.step(batches()[0])
    found = Counter(re.sub(r":\d+", "", place) for place in streams.waits)
    trainer.close()
    world.close()
    return found


@pytest.mark.parametrize(
    "plan, more",
    [
        ("dp=2 zero=3 recompute=full", {}),
        ("pp=2 microbatches=2 recompute=selective", {}),
        ("dp=2 offload=activations:cpu precision=bf16", {}),
        ("dp=2 offload=activations:disk", {}),
        ("tp=2", VALID),
        ("cp=2", PACKED),
        ("dp=2 ep=2", EXPERTS),
        ("dp=2 zero=3 offload=params:cpu,optimizer:cpu", SETTLED),
    ],
)
def test_the_host_waits_once_in_a_step(plan: str, more: Mapping[str, int]) -> None:
    for found in run(parsed(plan).mesh().size, waits, on=SimulatedAccelerators(), args=(plan,)):
        assert found == {**READS_TOTALS, **more}
