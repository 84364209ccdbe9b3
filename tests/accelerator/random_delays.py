"""Train steps of a small pipeline on simulated accelerators whose work is delayed by chance; no rank may wait for ever.

    PYTHONPATH=src:tests python tests/accelerator/random_delays.py --steps 10000            # each schedule
    PYTHONPATH=src:tests python tests/accelerator/random_delays.py zb-v --steps 10000 --seed 1

At each call, each operation that waits in a stream runs with a probability of 1/5, and otherwise later. A step is one
set of such delays. --waits: before each operation the host waits for all that are queued. Every step's loss is that of
the same step without delays."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelerator.simulated_accelerators import SimulatedAccelerators
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, run

WIDTH, ROWS = 2, 4


def _loss(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), ROWS


def _losses(world: World, plan: Plan, steps: int) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(plan.pp * plan.virtual_stages)]
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    options = Options(example=batch)
    trainer = parallelize(nn.Sequential(*layers).double(), plan, loss=_loss, world=world, options=options, lr=1e-4)
    found = [trainer.step(batch).loss for _ in range(steps)]
    trainer.close()
    world.close()
    return found


def random_delays(text: str, *, steps: int, seed: int, waits: bool = False) -> None:
    """Train `steps` steps under a plan with chance delays. Raises Deadlock, StreamRace, or Disagreement of a loss."""
    plan = Plan.parse(f"{text} microbatches=4 partition=params")
    devices: Sequence[Any] = (None, SimulatedAccelerators(timing="random", seed=seed, waits_at_launch=waits))
    plain, delayed = (run(plan.pp, _losses, args=(plan, steps), **({} if on is None else {"on": on})) for on in devices)
    agree(delayed, plain, bound=1e-9)


def main() -> None:
    """Run the steps of the schedules that the command line names."""
    from accelerator.test_grid import STAGED  # noqa: PLC0415 - which imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", default=list(STAGED))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--waits", action="store_true")
    flags = parser.parse_args()
    for schedule in flags.schedules:
        begun = time.perf_counter()
        for part in range(0, flags.steps, 500):
            steps = min(500, flags.steps - part)
            random_delays(STAGED[schedule], steps=steps, seed=flags.seed + part, waits=flags.waits)
        seconds = time.perf_counter() - begun
        print(f"{schedule:12} {flags.steps} steps with random delays, no deadlock, in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
