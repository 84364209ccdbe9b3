"""What a rank stores of a block falls as each scheme says: parameters, and what a forward leaves for its backward.

scheme                parameters    activations
1d                    1/tp          those within pairs 1/tp; hidden states whole on every rank (arXiv 2205.05198, eq. 2)
1d, tokens split      1/tp          1/tp                                                     (… eq. 4)
2d  (q x q)           1/q²          1/q²                                                     (arXiv 2104.05343)
2.5d (q x q x d)      1/q²          1/(q²·d)                                                 (arXiv 2105.14500)
3d  (p x p x p)       1/p³          1/p³                                                     (arXiv 2105.14450)"""

from functools import cache, partial

import pytest
import torch

from meshwise import Plan
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.engine.parallelize import parallelize
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import SavedForBackward, run
from warm_processes import Processes

ROWS, TOKENS = 64, 32
LOOSE = 0.1
"""Norms and their statistics are small and not all split; buckets are padded."""


def build(layers: int) -> GPT:
    return GPT(GPTConfig(vocabulary=256, context=TOKENS, layers=layers, heads=16, width=128, positions="rotary"))


def stored(world: World, plan: str) -> tuple[int, int]:
    """Bytes of a block's parameters, and of what one forward of it saves, on this rank."""
    one, two = (of_model(world, plan, layers) for layers in (1, 2))
    return two[0] - one[0], two[1] - one[1]


def of_model(world: World, plan: str, layers: int) -> tuple[int, int]:
    trainer = parallelize(partial(build, layers), plan, loss=next_token_loss, world=world, lr=1e-3)
    start, stop = trainer.share(ROWS)
    tokens = torch.arange(ROWS * TOKENS).remainder(256).view(ROWS, TOKENS)[start:stop]
    with SavedForBackward(trainer.model) as saved:
        output = trainer.model(tokens)
    assert output.requires_grad
    size = saved.bytes
    trainer.close()
    return trainer.memory()["parameters"], size


@cache
def traced(plan: str) -> tuple[int, int]:
    """On the first rank of a world of any size, of which nobody else is there."""
    torch.set_num_threads(1)
    return stored(TraceWorld(rank=0, mesh=Plan.parse(plan).mesh(), device="cpu"), plan)


SPLIT_EVERYTHING = {
    "tp=4 sequence_parallel=1": (4, 4),
    "tp=16 sequence_parallel=1": (16, 16),
    "tp=4 tp_mode=2d": (4, 4),
    "tp=16 tp_mode=2d": (16, 16),
    "tp=8 tp_mode=2.5d tp_depth=2": (4, 8),
    "tp=64 tp_mode=2.5d tp_depth=4": (16, 64),
    "tp=8 tp_mode=3d": (8, 8),
    "tp=64 tp_mode=3d": (64, 64),
}


@pytest.mark.parametrize("plan", SPLIT_EVERYTHING)
def test_parameters_and_activations_fall_by_the_factor_of_the_scheme(plan: str) -> None:
    whole, divided = traced("tp=1"), traced(plan)
    for before, after, factor in zip(whole, divided, SPLIT_EVERYTHING[plan], strict=True):
        assert before / after == pytest.approx(factor, rel=LOOSE)


def test_1d_divides_inner_activations_and_keeps_hidden_states_whole() -> None:
    one, four, sixteen = (traced(plan)[1] for plan in ("tp=1", "tp=4", "tp=16"))
    assert (one - four) / (one - sixteen) == pytest.approx((1 - 1 / 4) / (1 - 1 / 16), rel=0.01)
    assert traced("tp=1")[0] / traced("tp=16")[0] == pytest.approx(16, rel=LOOSE)


@pytest.mark.processes
def test_processes_store_what_the_trace_says(processes: Processes) -> None:
    for plan in ("tp=4", "tp=4 sequence_parallel=1", "tp=4 tp_mode=2d"):
        assert run(4, stored, on=processes, args=(plan,)) == [traced(plan)] * 4
