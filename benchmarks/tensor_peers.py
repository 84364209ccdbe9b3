"""Tensor parallelism beside the peers: the same model, the same ranks, turn by turn, as in `peers.py`.

    python benchmarks/tensor_peers.py                                     # meshwise and torch's DTensor
    python benchmarks/tensor_peers.py --python megatron=/path/to/python   # and Megatron-Core's layers
    python benchmarks/tensor_peers.py --only 2d --rounds 1                # 2d beside 1d

Every rank holds its part of every matrix and sees the whole batch. The last match is between two schemes of ours, 2d
and 1d at four ranks; what each moves in a step is counted on one rank."""

from __future__ import annotations

import copy
import sys

import torch

import gpt
import meshwise as mw
from games import Event, Game
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from tensor_contestants import contestant


def _game(ranks: int, ours: str, peer: str) -> Game:
    return Game(ranks, contestant(ours), contestant(peer))


GAMES = (
    _game(2, "meshwise 1d", "torch DTensor"),
    _game(4, "meshwise 1d", "torch DTensor"),
    _game(2, "meshwise 1d", "Megatron-Core"),
    _game(4, "meshwise 1d", "Megatron-Core"),
    _game(4, "meshwise 1d, sequence", "torch DTensor, sequence"),
    _game(4, "meshwise 2d", "meshwise 1d"),
)


def volume(shape: gpt.Shape, plan: str) -> int:
    """Bytes of the collectives of one step, as the first rank sees them."""

    def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return gpt.mean_loss(logits, batch[1]) * batch[1].numel(), batch[1].numel()

    def step(world: World) -> int:
        trainer = mw.parallelize(copy.deepcopy(model), plan, loss=loss, world=world, **gpt.ADAMW)
        with world.record() as records:
            trainer.step(gpt.global_batch(shape, step=0))
        return sum(record.bytes for record in records)

    model = gpt.build(shape)
    return run_threads(mw.Plan.parse(plan).mesh().size, step)[0]


def remarks(shape: gpt.Shape) -> list[str]:
    """What is measured, and what a step moves."""
    one, two = (volume(shape, plan) / 1e6 for plan in ("tp=4", "tp=4 tp_mode=2d"))
    return [
        "The peers talk over gloo. Every rank sees the whole batch.",
        f"Payload of the collectives of a step for each of four ranks: {one:.0f} MB under 1d, {two:.0f} MB under 2d.",
    ]


EVENT = Event("tensor_peers.py", __doc__, "tensor peers", games=GAMES, packages=["megatron"], remarks=remarks)


if __name__ == "__main__":
    sys.exit(EVENT.main(sys.argv[1:]))
