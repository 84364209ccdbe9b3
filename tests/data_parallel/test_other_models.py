"""Test that other models, batches and optimizers give the numbers of one process to 1e-9."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from last_outcome import alone, outcome
from meshwise.base.tensor_tree import take_rows
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, MLP, GPTConfig, MLPConfig, next_token_loss
from meshwise.testing import ReferenceRun, agree, run
from meshwise.verify import verify

WHOLE = ("dp=2", "dp=3 zero=1 microbatches=2", "dp=4 zero=2 microbatches=2")
CUT = ("dp=4 zero=3", "dp=3 zero=3 microbatches=2")
ROWS = (8, 5, 2)
over_plans = pytest.mark.grid(
    Grid({"plan": WHOLE + CUT}, heavy=lambda cell: cell["plan"] not in (WHOLE[1], CUT[1]))  # uneven rows
)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def vectors(width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in ROWS]


def check(plan: str, build: Callable[[], nn.Module], *, batches: list[Any] | None = None, **training: Any) -> None:
    def main(world: World) -> Any:
        return outcome(parallelize(copy.deepcopy(model), plan, world=world, **settings), batches=given)

    model = build().double()
    given = vectors() if batches is None else batches
    settings = {"loss": squares, "lr": 1e-2, "options": Options(clip_norm=0.5), **training}
    expected = alone(model, batches=given, **settings)
    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, expected, bound=1e-9)


def mlp() -> nn.Module:
    return MLP(MLPConfig(widths=(4, 6, 6, 3)))


# ---- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, arguments",
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
@pytest.mark.parametrize("plan", ["dp=3 zero=1 microbatches=2", "dp=4 zero=3"])
def test_optimizers(plan: str, optimizer: Any, arguments: Mapping[str, Any]) -> None:
    check(plan, mlp, optimizer=optimizer, **arguments)


def by_name(name: str, parameter: Tensor) -> dict[str, float]:
    return {"lr": 0.03 if "bias" in name else 0.01, "weight_decay": 0.0 if name.startswith("layers.1") else 0.3}


@over_plans
def test_parameter_groups(plan: str) -> None:
    check(plan, mlp, options=Options(parameter_options=by_name))


# ---- models --------------------------------------------------------------------------------------------------------


class CalledTwice(nn.Module):
    """One block for every layer (as ALBERT has it), called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = x + self.blocks[0](x)
        return self.head(x)


@over_plans
def test_a_block_that_is_called_three_times(plan: str) -> None:
    check(plan, CalledTwice)


def two_views(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.cat([model(batch), model(batch.flip(1))], dim=1)


@over_plans
def test_two_forward_passes_in_a_step(plan: str) -> None:
    check(plan, mlp, options=Options(forward=two_views, clip_norm=0.5))


class Unused(nn.Module):
    """Has a layer that is never used, and one whose output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.unused = nn.Linear(5, 5)
        self.dropped = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        self.dropped(x)
        return self.layer(x)


@over_plans
def test_parameters_without_a_gradient_decay_all_the_same(plan: str) -> None:
    check(plan, Unused, weight_decay=0.2)


class Branches(nn.Module):
    """Rows decide which branch is taken, so the ranks differ in which parameters get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        chosen = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        stem = torch.tanh(self.stem(x))
        output = x.new_zeros(len(x), 3)
        for number, branch in enumerate(self.branches):
            rows = chosen == number
            if rows.any():
                output = output.index_add(0, rows.nonzero().flatten(), branch(stem[rows]))
        return output


@pytest.mark.parametrize("plan", WHOLE)
def test_branches_that_only_some_ranks_take(plan: str) -> None:
    check(plan, Branches, weight_decay=0.2)


@pytest.mark.threads("ranks that hold the parameters together gather none")
@pytest.mark.parametrize("plan", CUT)
def test_branches_that_only_some_ranks_take_are_reported_when_parameters_are_gathered_for_them(plan: str) -> None:
    with pytest.raises(RanksDisagree, match="called different collectives"):
        check(plan, Branches)


class Tied(nn.Module):
    """One matrix under three names, in two blocks and the head, transposed in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4, bias=False)
        for layer in (self.blocks[1], self.head):
            layer.weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) + functional.linear(x, self.head.weight.T)


@over_plans
def test_a_matrix_tied_three_times(plan: str) -> None:
    check(plan, Tied)


class RootOwned(nn.Module):
    """Parameters owned by the root, a scalar and an empty one among them, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.shift = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x = x + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.scale + self.shift


@over_plans
def test_parameters_of_the_root_and_odd_shapes(plan: str) -> None:
    check(plan, RootOwned)


@over_plans
def test_buffers_and_grouped_heads(plan: str) -> None:
    generator = torch.Generator().manual_seed(6)
    drawn = [torch.randint(11, (rows, 6), generator=generator) for rows in ROWS]
    shape = GPTConfig(vocabulary=11, context=5, layers=2, heads=4, kv_heads=2, width=8, positions="rotary", tied=True)
    batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]
    check(plan, functools.partial(GPT, shape), batches=batches, loss=next_token_loss)


# ---- batches and losses --------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Takes two of a mapping's entries by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor, scale: Tensor) -> Any:
        return self.layer(features) * scale.unsqueeze(1)


def weighted(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (output.square().sum(1) * batch["weight"]).sum(), batch["weight"].sum()


@over_plans
def test_a_mapping_and_a_loss_whose_count_is_a_sum_of_weights(plan: str) -> None:
    def batch(x: Tensor) -> dict[str, Tensor]:
        return {"features": x, "scale": x[:, 1], "weight": torch.arange(len(x)) + 1}

    check(plan, Weighted, batches=[batch(x) for x in vectors()], loss=weighted)


@dataclass
class Pair:
    """A batch of the user's own class."""

    left: Tensor
    right: Tensor


def distance(model: nn.Module, batch: Pair) -> Any:
    return model(batch.left) - model(batch.right)


@over_plans
def test_a_dataclass_and_a_forward_of_the_users_own(plan: str) -> None:
    batches = [Pair(x, x.roll(1, 1)) for x in vectors()]
    check(plan, mlp, batches=batches, options=Options(forward=distance))


# ---- the rest of a trainer -----------------------------------------------------------------------------------------


@over_plans
def test_a_rank_may_bring_its_own_rows(plan: str) -> None:
    def main(world: World) -> list[tuple[float, float, int]]:
        trainer = parallelize(lambda: mlp().double(), plan, world=world, loss=squares, lr=1e-2)
        results = []
        for batch in vectors():
            start, stop = trainer.share(len(batch))
            results.append(trainer.step(take_rows(batch, start=start, stop=stop), local=True))
        return [(result.loss, result.grad_norm, result.tokens) for result in results]

    expected = alone(lambda: mlp().double(), batches=vectors(), loss=squares, lr=1e-2)
    numbers = [(step["loss"], step["grad_norm"], step["tokens"]) for step in expected]
    for results in run(Plan.parse(plan).mesh().size, main):
        agree(results, numbers, bound=1e-9)


@over_plans
def test_evaluation_is_the_sum_of_sums_over_the_sum_of_counts(plan: str) -> None:
    def main(world: World) -> tuple[float, int]:
        trainer = parallelize(lambda: mlp().double(), plan, world=world, loss=squares, lr=1e-2)
        trainer.step(vectors()[0])
        result = trainer.evaluate(vectors())
        return result.loss, result.tokens

    single = ReferenceRun(lambda: mlp().double(), loss=squares, lr=1e-2)
    single.backward(vectors()[0])
    single.update()
    expected = single.evaluate(torch.cat(vectors())), sum(ROWS)
    for result in run(Plan.parse(plan).mesh().size, main):
        agree(result, expected, bound=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@over_plans
def test_narrower_parameters_agree_to_what_the_dtype_explains(plan: str, dtype: torch.dtype) -> None:
    report = verify(mlp, squares, vectors(), plan, dtype=dtype, lr=1e-2, options=Options(clip_norm=0.5))
    assert report.ok, str(report)
