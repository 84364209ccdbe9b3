"""Save under one plan, load under another: the full state is the same, bit for bit, and training goes on.

The full state is what the reader of docs/checkpoints.md gets out of the folder, which knows nothing of meshwise; the
parameters are compared with those that the trainers themselves gather.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint.reader import read
from meshwise.comm.world import World
from meshwise.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, run
from meshwise.trainer import Trainer

PLANS = (
    "dp=1",
    "dp=2 zero=0",
    "dp=3 zero=0",
    "dp=2 zero=1",
    "dp=3 zero=1",
    "dp=4 zero=1",
    "dp=2 zero=2",
    "dp=3 zero=2",
    "dp=4 zero=2 microbatches=2",
    "dp=2 zero=3",
    "dp=3 zero=3",
    "dp=4 zero=3 microbatches=2",
)


class Uneven(nn.Module):
    """Sizes that nothing divides, a tie, a frozen layer, a scalar, a convolution, a buffer that the forward changes."""

    def __init__(self, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.again = nn.Linear(7, 7, dtype=dtype)
        self.tied = nn.Linear(7, 7, bias=False, dtype=dtype)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(7, 11, dtype=dtype).requires_grad_(False)
        self.spread = nn.Conv1d(1, 3, 3, dtype=dtype)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.tied(torch.tanh(self.again(torch.tanh(self.first(batch)))))
        output: Tensor = self.gain * self.spread(self.frozen(x)[:, None])
        return output


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float64
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-2), ("weight_decay", 0.1))

    def trainer(self, world: World, plan: str, *, seed: int = 0) -> Trainer:
        torch.manual_seed(seed)
        model = Uneven(dtype=self.dtype)
        return parallelize(model, plan, loss=loss, optimizer=self.optimizer, world=world, **dict(self.options))


def batches(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 5, generator=generator).to(dtype) for _ in range(3)]


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_parameters()}


def save(world: World, case: Case, plan: str, folder: Path) -> tuple[dict[str, Tensor], float]:
    """Two steps and a save; the parameters then, and the loss of the third step."""
    trainer = case.trainer(world, plan)
    first, second, third = batches(case.dtype)
    trainer.step(first)
    trainer.step(second)
    trainer.save(folder, extra={"steps": 2})
    return gathered(trainer), trainer.step(third).loss


def load(world: World, case: Case, plan: str, folders: Mapping[Path, Path]) -> list[tuple[dict[str, Tensor], float]]:
    """Load what other plans have saved into another model, save it again, and take the step that follows."""
    trainer = case.trainer(world, plan, seed=7)
    outcomes = []
    for one, other in folders.items():
        assert trainer.load(one) == {"steps": 2}
        trainer.save(other)
        outcomes.append((gathered(trainer), trainer.step(batches(case.dtype)[2]).loss))
    return outcomes


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


def there_and_back(case: Case, second: str, saved: Mapping[Path, tuple[dict[str, Tensor], float]], at: Path) -> None:
    """Load all that was saved, under the plan `second`."""
    folders = {folder: at / folder.name for folder in saved}
    for outcomes in run(ranks(second), load, args=(case, second, folders)):
        for (parameters, then), (expected, expected_then) in zip(outcomes, saved.values(), strict=True):
            same_tensors(parameters, expected)
            if case.dtype == torch.float64:
                agree({"loss": then}, {"loss": expected_then}, bound=1e-9)
    for one, other in folders.items():
        same_state(read(one), read(other))


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    same_tensors(*({key: value for key, value in state.items() if key[:5] != "rank/"} for state in (one, other)))


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[dict[str, Tensor], float]]:
    """What was saved under each plan."""
    root = tmp_path_factory.mktemp("saved")
    folders = {root / plan.replace(" ", "-"): plan for plan in PLANS}
    return {folder: run(ranks(plan), save, args=(Case(), plan, folder))[0] for folder, plan in folders.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_a_state_saved_under_any_plan_is_the_same_under_this_one(
    plan: str, saved: dict[Path, tuple[dict[str, Tensor], float]], tmp_path: Path
) -> None:
    there_and_back(Case(), plan, saved, tmp_path)


def test_the_parameters_in_the_files_are_those_of_the_model(saved: dict[Path, tuple[dict[str, Tensor], float]]) -> None:
    for folder, (parameters, _) in saved.items():
        state = read(folder)
        same_tensors({name: state[f"parameter/{name}"] for name in parameters}, parameters)


NARROW = Case(dtype=torch.bfloat16)
OTHERS = {
    "bf16 with fp32 masters": NARROW,
    "sgd with momentum": Case(optimizer=torch.optim.SGD, options=(("lr", 1e-2), ("momentum", 0.9))),
    "sgd without state": Case(optimizer=torch.optim.SGD, options=(("lr", 1e-2),)),
    "nadam, whose state has two numbers": Case(optimizer=torch.optim.NAdam),
    "adagrad": Case(optimizer=torch.optim.Adagrad),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_optimizers_and_dtypes_go_through_too(case: Case, tmp_path: Path) -> None:
    for first, second in itertools.pairwise(["dp=2 zero=0", "dp=3 zero=1", "dp=4 zero=3", "dp=1", "dp=2 zero=2"]):
        folder = tmp_path / first
        there_and_back(
            case, second, {folder: run(ranks(first), save, args=(case, first, folder))[0]}, tmp_path / second
        )


def test_everything_that_a_step_depends_on_is_there(tmp_path: Path) -> None:
    run(2, save, args=(Case(), "dp=2 zero=2", tmp_path / "one"))
    state = read(tmp_path / "one")
    trained = ["first.weight", "first.bias", "again.weight", "again.bias", "spread.weight", "spread.bias", "gain"]
    assert {f"parameter/{name}" for name in [*trained, "frozen.weight", "frozen.bias"]} <= state.keys()
    for name in trained:
        assert {f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}", f"scalar/step/{name}"} <= state.keys()
        assert state[f"scalar/step/{name}"].item() == 2
    assert state["buffer/seen"].tolist() == [2, 2, 2]
    assert "buffer/scratch" not in state
    assert not [key for key in state if key.endswith("tied.weight")]
    assert {"rank/0/random", "rank/1/random"} <= state.keys()


def masters(world: World, folder: Path) -> dict[str, Tensor]:
    trainer = NARROW.trainer(world, "dp=2 zero=1")
    trainer.step(batches(torch.bfloat16)[0])
    trainer.save(folder)
    return gathered(trainer)


def test_of_a_narrow_parameter_the_fp32_master_is_saved(tmp_path: Path) -> None:
    used = run(2, masters, args=(tmp_path / "one",))[0]
    state = read(tmp_path / "one")
    assert state["parameter/first.weight"].dtype == torch.float32
    assert torch.equal(state["parameter/first.weight"].bfloat16(), used["first.weight"])
    assert not torch.equal(state["parameter/first.weight"], used["first.weight"].float())
    assert state["parameter/frozen.weight"].dtype == torch.bfloat16
