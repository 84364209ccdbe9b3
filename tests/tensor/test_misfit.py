"""A forward that counts what a rank has a part of: where it stumbles is said, and what works."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import PlanError
from meshwise.reference import next_token_loss
from meshwise.testing import run
from tensor.plain import gpt


class Attention(nn.Module):
    """Knows that there are four heads, and takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.apart(linear(x)) for linear in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y

    def apart(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_head, -1).transpose(1, 2)


class Constant(Attention):
    def apart(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), 4, 4).transpose(1, 2)


class Block(nn.Module):
    """Makes its mask as long as what it is given."""

    def __init__(self, attention: nn.Module, *, masks: bool) -> None:
        super().__init__()
        self.attention, self.masks = attention, masks
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1) if self.masks else None
        x = x + self.attention(self.norm(x), mask)
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *, constant: bool = False, masks: bool = False) -> None:
        super().__init__()
        self.embedding = gpt().embedding
        self.blocks = nn.ModuleList(Block(Constant() if constant else Attention(), masks=masks) for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def step(model: nn.Module | Callable[[], nn.Module], plan: str, rules: dict[str, str] | None = None) -> None:
    tokens = torch.randint(0, 24, (4, 7), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1], tokens[:, 1:])

    def main(world: World) -> Any:
        settings: dict[str, Any] = {"loss": next_token_loss, "lr": 1e-2}
        options = Options(tensor_rules=rules, example=batch)
        parallelize(copy.deepcopy(model), plan, world=world, options=options, **settings).step(batch)

    run(4 if "pp" in plan else 2, main)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 pp=2 microbatches=2"])
def test_a_constant_that_counts_all_heads(plan: str) -> None:
    rule = r'the rule \{"blocks\.\*\.attention": "whole"\}'
    with pytest.raises(PlanError, match=rf"blocks\.\d\.attention cannot .*test_misfit\.py:\d+, .*a constant.*{rule}"):
        step(Model(constant=True), plan)
    step(Model(constant=True), plan, {"blocks.*.attention": "whole"})


def test_a_mask_as_long_as_a_part_of_the_tokens() -> None:
    with pytest.raises(PlanError, match=r"a part .* of the tokens .*masks and positions outside.*sequence_parallel=0"):
        step(Model(masks=True), "tp=2 sequence_parallel=1")
    step(Model(masks=True), "tp=2 sequence_parallel=0")


def test_a_number_of_all_tokens_where_no_matrix_is_split() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x.view(-1, 6, 16))))  # type: ignore[no-any-return]

    model = Model()
    model.blocks = nn.ModuleList(Views() for _ in range(2))
    rules = {"blocks.*.up": "whole", "blocks.*.down": "whole", "head": "whole"}
    with pytest.raises(PlanError, match=r"blocks\.0 cannot be run on the part .*sequence_parallel=0"):
        step(model, "tp=2 sequence_parallel=1", rules)
    step(model, "tp=2 sequence_parallel=0", rules)


class TooLargeError(ValueError):
    pass


def test_other_errors_of_a_model_are_left_alone() -> None:
    class Other(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            raise RuntimeError(f"no luck with {len(tokens)}")

    class Own(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            raise TooLargeError(f"no such size as {len(tokens)}")

    with pytest.raises(RuntimeError, match=r"^no luck"):
        step(Other(), "tp=2")
    with pytest.raises(TooLargeError, match=r"^no such size"):
        step(Own(), "tp=2")


def test_a_mask_that_names_no_device_is_no_obstacle_to_a_cut() -> None:
    step(lambda: Model(masks=True), "tp=2 pp=2 microbatches=2")
