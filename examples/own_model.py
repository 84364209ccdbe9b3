"""Train a model of your own under a plan: `python examples/own_model.py`, or the same file under torchrun.

The model and the loss know no rank. The plan is the one line that says how the training is split; try others:

    python examples/own_model.py "dp=1"
    python examples/own_model.py "dp=4 zero=3 microbatches=2"
    torchrun --standalone --nproc-per-node=3 examples/own_model.py "dp=3 zero=2"

Every plan prints the same losses, to rounding."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import meshwise as mw

Batch = tuple[Tensor, Tensor]


class Waves(nn.Module):
    """A small network from numbers to a curve: numbers (B, 1) to values (B, 1)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the curve at x."""
        curve: Tensor = self.layers(x)
        return curve


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Return the squared error summed over the batch, and the number of terms; the engine divides."""
    _, target = batch
    return (output - target).square().sum(), target.numel()


def batches(steps: int) -> Iterator[Batch]:
    """Global batches, the same on every rank; each rank takes its own rows of them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.rand(64, 1, generator=generator) * 6
        yield x, torch.sin(2 * x) + 0.3 * x


def main(world: mw.World, plan: str) -> None:
    """Train on one rank."""
    trainer = mw.parallelize(Waves, plan, loss=loss, optimizer=torch.optim.AdamW, world=world, lr=3e-3)
    for step, batch in enumerate(batches(300), start=1):
        result = trainer.step(batch)
        if world.rank == 0 and step % 50 == 0:
            print(f"step {step}  loss {result.loss:.5f}  gradient norm {result.grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    plan = mw.Plan.parse(sys.argv[1] if len(sys.argv) > 1 else "dp=2 zero=1")
    mw.run(plan.mesh().size, main, args=(str(plan),))
