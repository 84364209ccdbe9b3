"""Time Muon's step on local ranks: each matrix on one rank, beside the naive gather of each matrix on every rank.

    python benchmarks/optimizers.py [--ranks 4] [--width 256] [--layers 4] [--rounds 9]

Both optimizers update the same slices of the same model under dp=RANKS zero=1, in alternating rounds. It prints the
median milliseconds of a step of either, their ratio in each round, and of AdamW over the same elements."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise import World, parallelize, run
from meshwise.data_parallel.checkpoint_slices import optimizer_slices
from meshwise.data_parallel.whole_parameter_functions import LogicalSlices
from meshwise.engine.trainer import Trainer
from meshwise.optim import Muon, Several
from meshwise.reference import GPT, GPTConfig, next_token_loss


class Everywhere(LogicalSlices):
    """Access to whole parameters as it is written naively: every rank gathers every matrix, and computes them all."""

    def map_whole(
        self,
        values: Mapping[nn.Parameter, Tensor],
        *_: Mapping[nn.Parameter, Tensor],
        groups: Any,
        function: Callable[..., Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace the values of each whole parameter by `function` of them."""
        names = {name for group in groups for name in group["names"]}
        for bucket in self._engine.buckets:
            whole = bucket.gathered_from(
                torch.cat([values[p] if p in values else torch.zeros_like(p) for _, p in bucket.slices])
            )
            for piece in bucket.place.pieces:
                if piece.row.name in names:
                    here = whole[piece.start : piece.stop]
                    here.copy_(function(None, here.view(piece.shape).to(dtype or here.dtype)).reshape(-1))
            for part, parameter in optimizer_slices(bucket):
                if parameter in values:
                    values[parameter].copy_(whole[part.start : part.stop])


class NaiveMuon(Muon):
    """Muon that gathers every matrix on every rank."""

    def __init__(self, params: Any, *, logical: LogicalSlices, **arguments: Any) -> None:
        super().__init__(params, logical=Everywhere(logical._engine), **arguments)


def trainer_of(kind: type[torch.optim.Optimizer], world: World, arguments: argparse.Namespace) -> Trainer:
    """Return a trainer of a GPT whose matrices are updated by `kind`, and the rest by AdamW."""

    def build() -> GPT:
        shape = GPTConfig(layers=arguments.layers, width=arguments.width, heads=4, vocabulary=256, context=16)
        return GPT(shape)

    optimizers = {"hidden": (kind, {"lr": 1e-3}), "rest": (torch.optim.AdamW, {"lr": 1e-3})}
    plan = f"dp={world.size} zero=1"
    return parallelize(build, plan, loss=next_token_loss, world=world, optimizer=Several, optimizers=optimizers)


def seconds(trainer: Trainer) -> float:
    """The time of one step of the optimizer alone, from a barrier to a barrier."""
    generator = torch.Generator().manual_seed(trainer.world.rank)
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    trainer.world.barrier()
    started = time.perf_counter()
    trainer.optimizer.step()
    trainer.world.barrier()
    return time.perf_counter() - started


def main(world: World, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each round, by optimizer."""
    torch.set_num_threads(1)
    kinds = {"divided": Muon, "naive": NaiveMuon, "adamw": torch.optim.AdamW}
    trainers = {name: trainer_of(kind, world, arguments) for name, kind in kinds.items()}
    for trainer in trainers.values():
        seconds(trainer)
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(arguments.rounds):
        for name, trainer in trainers.items():
            found[name].append(seconds(trainer))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("width", 256), ("layers", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    times = run(given.ranks, main, args=(given,))[0]
    for name, values in times.items():
        print(f"{name:8} {1e3 * statistics.median(values):8.1f} ms")
    ratios = sorted(one / other for one, other in zip(times["divided"], times["naive"], strict=True))
    print(f"divided / naive: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
