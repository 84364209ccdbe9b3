"""Test that a step that raises changes nothing, and that its repetition gives the same result."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.model.forward import LossError
from meshwise.pipeline.run.stage_forward import StageError
from meshwise.testing import agree, run

ROWS, WIDTH = 8, 4


class Trap:
    """Raises once, at a place, when it is set."""

    def __init__(self) -> None:
        self.place = ""

    def __call__(self, here: str) -> None:
        if here == self.place:
            self.place = ""
            raise LookupError(here)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        trap("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.trap("backward")
        return gradients[0], None


class Block(nn.Module):
    """Draws, and keeps statistics, on both sides of what may raise."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(self.down(self.up(x).relu())))
        output: Tensor = x + self.dropout(Passing.apply(y, self.trap))
        return output


def training(world: World, plan: str, trap: Trap, **options: Any) -> Trainer:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        trap("loss")
        return output.square().sum(), batch.shape[0]

    torch.manual_seed(0)
    blocks = (Block(Trap()), Block(trap))
    made = Options(clip_norm=1.0, **options)
    return parallelize(nn.Sequential(*blocks), plan, world=world, loss=loss, lr=1e-2, options=made)


def state(trainer: Trainer) -> dict[str, Any]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        "parameters": {name: value.clone() for name, value in trainer.full_parameters()},
        "buffers": {name: value.clone() for name, value in trainer.full_buffers()},
        "optimizer": {str(n): {key: value.clone() for key, value in state[n].items()} for n in state},
    }


PLANS = ("dp=1 random=local", "dp=2", "dp=2 zero=2 microbatches=2", "dp=2 zero=3 microbatches=2", "tp=2")


@pytest.mark.grid(
    Grid(
        {"plan": PLANS, "place": ("forward", "backward", "loss")},
        # Only ZeRO 3 has parameters there that a failure could leave behind.
        heavy=lambda cell: cell["plan"] in (PLANS[2], PLANS[4]) and cell["place"] != "backward",
    )
)
def test_a_step_that_raised_has_no_effect(plan: str, place: str) -> None:
    batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def main(world: World, *, failing: bool) -> dict[str, Any]:
        trap = Trap()
        trainer = training(world, plan, trap)
        losses = []
        for number, batch in enumerate(batches):
            if failing and number == 1:
                before = state(trainer)
                trap.place = place
                with pytest.raises(LookupError, match=place):
                    trainer.step(batch)
                agree(state(trainer), before, bound=0.0)
                with pytest.raises(RuntimeError, match="the last step was skipped or raised an exception"):
                    next(trainer.full_gradients())
            losses.append(trainer.step(batch).loss)
        return {"losses": losses, **state(trainer)}

    ranks = 1 if plan.startswith("dp=1") else 2
    with_failure, without = (run(ranks, lambda world, f=f: main(world, failing=f)) for f in (True, False))
    agree(with_failure, without, bound=0.0)


def test_a_message_of_a_step_that_broke_off_is_not_taken_for_one_of_the_next_step() -> None:
    """The second stage fails when it has posted the receive of micro-batch 1, which the first one never sends."""
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()

    class Fragile(nn.Linear):
        fails_at, calls = -1, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == self.fails_at:
                raise LookupError("fragile")
            return super().forward(x)

    def main(world: World) -> None:
        torch.manual_seed(0)
        layers = [Fragile(WIDTH, WIDTH).double() for _ in range(2)]
        trainer = parallelize(
            nn.Sequential(*layers),
            "pp=2 microbatches=2 schedule=gpipe",
            world=world,
            loss=lambda output, _: (output.square().sum(), ROWS),
            lr=1e-2,
            options=Options(example=batch),
        )
        trainer.step(batch)
        layer = next(each for each in trainer.model.modules() if isinstance(each, Fragile) and each.calls)
        layer.fails_at = layer.calls + 2 - world.rank
        with pytest.raises(LookupError, match="fragile"):
            trainer.step(batch)
        with pytest.raises(StageError, match=f"an earlier step broke off in {world.rank}F{1 - world.rank} on rank"):
            trainer.step(batch)

    run(2, main)


def test_a_step_that_was_skipped_draws_nothing() -> None:
    batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def main(world: World, *, skipping: bool) -> dict[str, Any]:
        trainer = training(world, "dp=2", Trap(), nonfinite="skip:1")
        trainer.step(batches[0])
        if skipping:
            assert trainer.step(batches[1] / 0).skipped
        return {"loss": trainer.step(batches[2]).loss, **state(trainer)}

    skipped, without = (run(2, lambda world, s=s: main(world, skipping=s)) for s in (True, False))
    agree(skipped, without, bound=0.0)


@pytest.mark.parametrize(
    "plan", ["dp=1 microbatches=2", "dp=2", "dp=2 zero=3 microbatches=2", "tp=2 microbatches=2", "pp=2 microbatches=2"]
)
def test_a_count_below_0_is_not_hidden_by_larger_ones(plan: str) -> None:
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    marked = torch.cat([torch.full((1, WIDTH), -9.0), batch[1:]])

    def loss(output: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return output.square().sum(), torch.tensor(-1 if rows[0, 0] == -9 else 100)

    def main(world: World) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Block(Trap()), Block(Trap()))
        trainer = parallelize(model, plan, world=world, loss=loss, lr=1e-2, options=Options(example=batch))
        before = state(trainer)
        for use in (lambda: trainer.step(marked), lambda: trainer.evaluate([batch, marked])):
            with pytest.raises(LossError, match="a count that loss returned is below 0 or NaN; each must be"):
                use()
        agree(state(trainer), before, bound=0.0)
        trainer.step(batch)

    run(1 if plan.startswith("dp=1") else 2, main)
