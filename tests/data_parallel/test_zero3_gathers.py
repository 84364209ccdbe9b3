"""Test ZeRO-3 gathers: parameters are gathered only while they are needed, and every kind of use gathers them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grid import Grid
from joined_worlds import holds_together
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.testing import agree, run

WIDTH, BLOCKS = 8, 5
CUT = ("dp=2 zero=3", "dp=3 zero=3 microbatches=2")
# more micro-batches, and ranks that a batch is not even for, show what one of two ranks shows
over_plans = pytest.mark.grid(Grid({"plan": CUT}, heavy=lambda cell: cell["plan"] == "dp=2 zero=3"))


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.shape[0]


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Stack(nn.Module):
    """Blocks alone: every unit has the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Stack):
    """Runs every block again in the backward."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x: Tensor) -> Any:
        return self.narrow(torch.tanh(self.wide(x)))


class CheckpointedInside(Stack):
    """Every block runs a part of itself again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CheckpointedBlock() for _ in range(BLOCKS)])


def doubled(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build().double()


def check(plan: str, build: Callable[[], nn.Module], *, data: list[Tensor] | None = None) -> None:
    """Under the plan the model trains as on one process."""
    model, data = doubled(build), data or batches()

    def main(world: World) -> Any:
        return outcome(trained(world, plan, copy.deepcopy(model)), batches=data)

    expected = alone(model, batches=data, loss=squares, lr=1e-2)
    for steps in run(int(plan[3]), main):
        agree(steps, expected, bound=1e-9)


def trained(world: World, plan: str, model: nn.Module, *, steps: int = 0) -> Trainer:
    trainer = parallelize(model, plan, world=world, loss=squares, lr=1e-2)
    for batch in batches(steps):
        trainer.step(batch)
    return trainer


def is_whole(module: nn.Module) -> bool:
    """Looked at through `.data`: a parameter that is itself passed to torch is gathered for it."""
    return not any(bool(parameter.data.isnan().any()) for parameter in module.parameters())


# ---- how much is whole ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Stack, Checkpointed, CheckpointedInside])
@over_plans
def test_at_most_two_units_are_whole_at_a_time(plan: str, build: Callable[[], nn.Module]) -> None:
    def main(world: World) -> tuple[list[int], int, int]:
        trainer = trained(world, plan, doubled(build), steps=3)
        padded = 16 * world.size
        units = [-(-unit.numel // padded) * padded * 8 for unit in trainer.table.units]
        return units, trainer.memory()["gathered_peak"], 0 if holds_together(world) else 2

    for units, peak, whole in run(int(plan[3]), main):
        assert len(units) == BLOCKS
        assert peak == whole * max(units)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_prefetch_is_how_many_units_are_gathered_ahead(prefetch: int) -> None:
    plan = f"dp=2 zero=3 microbatches=2 prefetch={prefetch}"

    def main(world: World) -> tuple[int, int]:
        trainer = trained(world, plan, doubled(Stack), steps=3)
        size = max(-(-unit.numel // 32) * 32 * 8 for unit in trainer.table.units)
        return size * (0 if holds_together(world) else 1 + prefetch), trainer.memory()["gathered_peak"]

    check(plan, Stack)
    for expected, peak in run(2, main):
        assert peak == expected


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=2 microbatches=2", "dp=3 zero=3 microbatches=2"])
def test_units_joined_in_buckets_change_no_number(plan: str) -> None:
    check(f"{plan} bucket=5K", Stack)

    def main(world: World) -> int:
        return len(trained(world, f"{plan} bucket=5K", doubled(Stack)).table.units)

    assert set(run(int(plan[3]), main)) == {3}  # a block has 2,240 bytes


@over_plans
def test_a_block_is_whole_while_it_runs_and_no_other_is(plan: str) -> None:
    def main(world: World) -> None:
        model = doubled(Stack)
        blocks = list(model.get_submodule("blocks").children())
        seen: list[list[bool]] = []

        def look(_module: nn.Module, _args: Any, _output: Any) -> None:
            seen.append([is_whole(block) for block in blocks])

        trainer = trained(world, plan, model)
        for block in blocks:
            block.register_forward_hook(look)
        for batch in batches():
            trainer.step(batch)
        one_at_a_time = [[here == other for other in range(BLOCKS)] for here in range(BLOCKS)]
        assert seen == one_at_a_time * (3 * trainer.plan.microbatches)

    run(int(plan[3]), main)


@over_plans
def test_parameters_between_steps_are_nan_of_the_right_shape(plan: str) -> None:
    def main(world: World) -> None:
        model = doubled(Stack)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        trainer = trained(world, plan, model, steps=1)
        trainer.evaluate(batches())
        for _ in trainer.full_parameters():
            pass
        for name, parameter in trainer.model.named_parameters():
            assert parameter.shape == shapes[name]
            assert bool(parameter.isnan().all()), name

    run(int(plan[3]), main)


@over_plans
def test_full_parameters_that_a_caller_kept_stay_readable(plan: str) -> None:
    def main(world: World) -> None:
        trainer = trained(world, plan, doubled(Stack), steps=1)
        copies = {name: value.clone() for name, value in trainer.full_parameters()}
        kept = dict(trainer.full_parameters())
        assert all(value.untyped_storage().nbytes() for value in kept.values())  # reading freed memory is no exception
        agree(kept, copies, bound=0.0)

    run(int(plan[3]), main)


@over_plans
def test_a_state_dict_of_parameters_at_rest_is_refused(plan: str) -> None:
    def main(world: World) -> None:
        trainer = trained(world, plan, doubled(Stack), steps=1)
        with pytest.raises(RuntimeError, match=r"zero=3.* splits the parameters.*trainer\.state_dict\(\)"):
            trainer.model.state_dict()

    run(int(plan[3]), main)


def test_on_one_rank_nothing_rests_and_state_dict_is_the_model() -> None:
    def main(world: World) -> None:
        trainer = trained(world, "zero=3", doubled(Stack), steps=1)
        full = {name: value.clone() for name, value in trainer.full_parameters()}
        agree(dict(trainer.model.state_dict()), full, bound=0.0)
        assert trainer.memory()["gathered_peak"] == 0

    run(1, main)


# ---- parameters that are used in other ways ------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Checkpointed, CheckpointedInside])
@over_plans
def test_activation_checkpointing_changes_no_number(plan: str, build: Callable[[], nn.Module]) -> None:
    check(plan, build)


class HeadByName(Stack):
    """The head is the first layer's matrix, reached in a way that its source does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(self.wte(x))
        return functional.linear(x, getattr(self, "w" + "te").weight)


class AtOnceByName(HeadByName):
    """The matrix is used a second time while it is still whole, before the blocks run."""

    def forward(self, x: Tensor) -> Any:
        x = self.wte(x)
        x = functional.linear(torch.tanh(x), getattr(self, "w" + "te").weight)
        return Stack.forward(self, x)


class InAList(HeadByName):
    """The matrix is used inside a list: torch.stack sees it, no argument is a parameter."""

    def forward(self, x: Tensor) -> Any:
        x = Stack.forward(self, self.wte(x))
        weight = getattr(self, "w" + "te").weight
        return x @ torch.stack([weight, weight]).sum(0)


class OfANeighbour(Stack):
    """Each block also uses a matrix of the block before it."""

    def forward(self, x: Tensor) -> Any:
        before = None
        for block in self.blocks:
            x = block(x)
            if before is not None:
                x = x + functional.linear(x, getattr(before, "wide").weight)[:, :WIDTH]  # noqa: B009 (not to be seen)
            before = block
        return x


@pytest.mark.parametrize("build", [HeadByName, AtOnceByName, InAList, OfANeighbour])
@over_plans
def test_a_parameter_used_outside_its_module(plan: str, build: Callable[[], nn.Module]) -> None:
    check(plan, build)


class Unused(Stack):
    """A block that never runs, and one that runs for nothing."""

    def forward(self, x: Tensor) -> Any:
        for block in list(self.blocks)[:-2]:
            x = block(x)
        self.blocks[-2](x)
        return x


@over_plans
def test_unused_parameters(plan: str) -> None:
    check(plan, Unused)


class Handing(nn.Module):
    """A block that hands on what the first of its kind made, as blocks do that share a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, handed: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.wide(x))
        made = hidden.mean(-1, keepdim=True) if handed is None else handed
        return x + self.narrow(hidden * made), made


class HandedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Handing() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Any:
        x, handed = self.entry(x), None
        for block in self.blocks:
            x, handed = block(x, handed)
        return x


class Adding(Block):
    """Returns the tensor that it was given, changed."""

    def forward(self, x: Tensor) -> Any:
        return x.add_(self.narrow(torch.tanh(self.wide(x.clone()))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Adding() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Any:
        x = self.entry(x) * 1
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("build", [HandedOn, InPlace])
def test_what_a_block_only_passes_on_is_not_what_it_made(build: Callable[[], nn.Module]) -> None:
    check("dp=2 zero=3", build)


class Changing(Stack):
    """Takes the blocks in another order in every forward: each guess of what comes next is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        for number in range(BLOCKS):
            x = self.blocks[(number * 2 + self.calls) % BLOCKS](x)
        return x


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=3 zero=3"])
def test_another_order_in_every_step_costs_gathers_and_no_number(plan: str) -> None:
    check(plan, Changing)
