"""Models, and the way of a state from one plan to another and back to a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from checkpoint.reader import read
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run
from warm_processes import Processes

Then = tuple[dict[str, Tensor], float]
"""The parameters of a state, and the loss of the step that follows it."""


class Uneven(nn.Module):
    """Sizes that nothing divides, no size, a tie, a frozen layer, a scalar, a convolution, a buffer that is changed."""

    def __init__(self, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.again = nn.Linear(7, 7, dtype=dtype)
        self.tied = nn.Linear(7, 7, bias=False, dtype=dtype)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(7, 11, dtype=dtype).requires_grad_(False)
        self.spread = nn.Conv1d(1, 3, 3, dtype=dtype)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.nothing = nn.Parameter(torch.ones(7, 0, dtype=dtype))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.tied(torch.tanh(self.again(torch.tanh(self.first(batch)))))
        x = x + (x @ self.nothing).sum()
        output: Tensor = self.gain * self.spread(self.frozen(x)[:, None])
        return output


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


@dataclass(frozen=True)
class Case:
    """A training of `Uneven`, or, with heads, of a GPT."""

    dtype: torch.dtype = torch.float64
    heads: int = 0
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-2), ("weight_decay", 0.1))

    def trainer(self, world: World, plan: str, *, seed: int = 0) -> Trainer:
        torch.manual_seed(seed)
        counts = next_token_loss if self.heads else loss
        return parallelize(
            self._model(),
            plan,
            loss=counts,
            optimizer=self.optimizer,
            world=world,
            options=Options(example=self.batches()[0]),
            **dict(self.options),
        )

    def _model(self) -> nn.Module:
        if not self.heads:
            return Uneven(dtype=self.dtype)
        shape = GPTConfig(
            vocabulary=24,
            context=4,
            layers=2,
            heads=self.heads,
            width=4 * self.heads,
            mlp_ratio=2,
            tied=True,
            bias=True,
        )
        return GPT(shape).to(self.dtype)

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        if not self.heads:
            return [torch.randn(8, 5, generator=generator).to(self.dtype) for _ in range(2)]
        tokens = [torch.randint(24, (8, 5), generator=generator) for _ in range(2)]
        return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_parameters()}


def save(world: World, case: Case, plan: str, folder: Path) -> Then:
    """A step and a save; the parameters then, and the loss of the step that follows."""
    trainer = case.trainer(world, plan)
    first, second = case.batches()
    trainer.step(first)
    trainer.save(folder, extra={"steps": 1})
    return gathered(trainer), trainer.step(second).loss


def load(world: World, case: Case, plan: str, folders: Mapping[Path, Path]) -> list[Then]:
    """Load what other plans have saved into another model, save it again, and take the step that follows."""
    trainer = case.trainer(world, plan, seed=7)
    outcomes = []
    for one, other in folders.items():
        assert trainer.load(one) == {"steps": 1}
        trainer.save(other)
        outcomes.append((gathered(trainer), trainer.step(case.batches()[1]).loss))
    return outcomes


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


def there_and_back(
    case: Case,
    second: str,
    saved: Mapping[Path, Then],
    at: Path,
    *,
    on: Literal["threads"] | Processes = "threads",
) -> None:
    """Load all that was saved, under the plan `second`."""
    folders = {folder: at / folder.name for folder in saved}
    for outcomes in run(ranks(second), load, on=on, args=(case, second, folders)):
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
        assert value.dtype == other[name].dtype or not value.numel(), (
            name
        )  # the page's reader knows no dtype of nothing
        assert torch.equal(value, other[name]), name
