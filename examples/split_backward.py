"""The backward of tensor and pipeline parallelism, with the communication overlapped, checked against one process.

Four ranks: two stages of half the blocks each, and in each stage every matrix over two ranks.

                     rank 0 · rank 1                 rank 2 · rank 3
    forward     x ─► blocks 0 … 3 ───── hidden ────► blocks 4 … 7 ─► loss
    backward         blocks 0 … 3 ◄─ its gradient ── blocks 4 … 7

Per block, with X the input, W the first matrix (split by columns) and V the second (split by rows):

    forward     Y = gelu(X W)           each rank its columns, nothing is sent
                Z = Y V                 a sum over the ranks
    backward    dY = dZ Vᵀ, dV = Yᵀ dZ  nothing is sent
                dX = dY Wᵀ              a sum over the ranks, which travels while dW = Xᵀ dY is computed

And from stage to stage: a schedule that splits the backward sends dX before it computes dW (`I`, then `W`), so that the
stage before goes on while this one still works. Nothing of it is written here; the plan says it:

    python examples/split_backward.py
    python examples/split_backward.py "pp=2 tp=2 microbatches=4 schedule=1f1b"
    python examples/split_backward.py "pp=4 microbatches=8 schedule=zb-v virtual_stages=2"
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwise as mw

WIDTH, BLOCKS, ROWS = 64, 8, 32
RULES = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise", "blocks.*.norm": "norm"}


class Block(nn.Module):
    """x + V gelu(W norm(x)): (B, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, which knows no rank."""
        out: Tensor = x + self.second(functional.gelu(self.first(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for block in self.blocks:
            x = block(x)
        return x


def build() -> nn.Module:
    """Return the model in float64, so that gradients can be compared to the last digits."""
    return Stack().double()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the squared error and the number of terms."""
    return (output - batch[1]).square().sum(), batch[1].numel()


def alone(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of one process, in plain torch."""
    with torch.device("meta"):  # nothing is drawn for parameters that come from elsewhere
        model = build()
    model.load_state_dict(parameters, assign=True)
    total, count = loss(model(batch[0]), batch)
    (total / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def main(world: mw.World, plan: str) -> float:
    """Run a step under the plan, compare its gradients with one process, and print where the time went.

    Return the largest relative difference of a gradient."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()
    options = mw.Options(example=(x, y), tensor_rules=RULES if mw.Plan.parse(plan).tp > 1 else None)
    trainer = mw.parallelize(build, plan, loss=loss, world=world, options=options, lr=1e-3)
    parameters = {name: value.clone() for name, value in trainer.full_parameters()}
    trainer.step((x, y))
    split = {name: value.clone() for name, value in trainer.full_gradients()}
    whole = alone(parameters, (x, y))
    apart = max(float((split[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    with mw.measure(trainer) as measuring:
        for _ in range(3):
            trainer.step((x, y))
    step = measuring.typical()
    if world.rank == 0:
        print(f"{trainer.cut}\n")
        print(f"{len(whole)} gradients, the largest relative difference from one process: {apart:.1e}\n")
        print(f"{step}", flush=True)
    return apart


if __name__ == "__main__":
    line = sys.argv[1] if len(sys.argv) > 1 else "pp=2 tp=2 microbatches=4 schedule=zb-h1"
    apart = mw.run(mw.Plan.parse(line).mesh().size, main, args=(line,))[0]
    sys.exit(apart > 1e-9)
