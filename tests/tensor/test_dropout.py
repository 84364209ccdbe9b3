"""With dropout, too, a split model trains as one process does: three steps in float64, to 1e-9.

The models draw on hidden states, inner features and attention scores; between them they use nn.Dropout, F.dropout,
fused attention, nn.MultiheadAttention and a repeated forward. Most plans do not divide the batches. More schemes are in
`test_grid`."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run
from warm_processes import Processes

VOCABULARY, TOKENS, WIDTH = 19, 5, 16


class Encoder(nn.Module):
    """torch's own encoder over an embedding, for next tokens as well."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.3, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, tokens: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), tokens.device, torch.float64)
        x = self.embedding(tokens)
        x = self.layers(x if self.batch_first else x.transpose(0, 1), mask=mask, is_causal=True)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def encoder() -> nn.Module:
    return Encoder()


def tokens_first() -> nn.Module:
    return Encoder(batch_first=False)


class Mixing(Encoder):
    """An encoder behind which all features meet: a length is taken, and tokens are put side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.pooler = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = functional.normalize(self.pooler(self.layers(self.embedding(tokens))) * self.scale, dim=-1)
        return self.head(functional.dropout(torch.cat((x, x.mean(1, keepdim=True).expand_as(x)), dim=-1), 0.3))


def mixing() -> nn.Module:
    return Mixing()


class Noisy(GPT):
    """A GPT whose blocks are left out at random for each sample, and whose hidden states are noisy."""

    def forward(self, tokens: Tensor) -> Tensor:
        """As a GPT's."""
        x = self.embedding(tokens)
        x = x + 0.1 * torch.randn_like(x) if self.training else x
        for block in self.blocks:
            kept = torch.rand(len(tokens), 1, 1, dtype=x.dtype, device=x.device) < 0.5 if self.training else 1.0
            x = x + kept * (block(x) - x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def noisy() -> nn.Module:
    return Noisy(config(dropout=0.0, positions="rotary"))


class Repeating(GPT):
    """A GPT that keeps no activations of its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        """As a GPT's."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def config(**changes: Any) -> GPTConfig:
    shape: dict[str, Any] = {"vocabulary": VOCABULARY, "context": TOKENS, "layers": 2, "heads": 4, "width": WIDTH}
    return GPTConfig(**shape | {"mlp_ratio": 2, "dropout": 0.3} | changes)


def gpt() -> nn.Module:
    return GPT(config(tied=True))


def repeating() -> nn.Module:
    return Repeating(config(positions="rotary"))


Build = Callable[[], nn.Module]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator) for rows in (8, 5, 3)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


TRAINING: dict[str, Any] = {
    "loss": next_token_loss,
    "options": Options(clip_norm=0.5, seed=4),
    "lr": 1e-2,
}


@functools.cache
def existing(build: Build) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


@functools.cache
def expected(build: Build) -> Any:
    return alone(existing(build), batches=batches(), **TRAINING)


def trained(world: World, plan: str, model: nn.Module) -> Any:
    return outcome(parallelize(copy.deepcopy(model), plan, world=world, **TRAINING), batches=batches())


CASES = (
    (gpt, "dp=4 microbatches=2"),
    (gpt, "dp=3 zero=3"),
    (gpt, "tp=3 sequence_parallel=1 zero=1"),
    (gpt, "dp=2 tp=2 microbatches=2 zero=3"),
    (encoder, "dp=2"),
    (tokens_first, "dp=2 tp=2 sequence_parallel=1"),
    (mixing, "tp=4 tp_mode=2d"),
    (repeating, "dp=2 microbatches=3 zero=3"),
    (repeating, "dp=2 tp=2 sequence_parallel=1"),
    (repeating, "tp=4 tp_mode=2d"),
)
OTHERS = (6, 8)
"""Numbers of cases: of these the part has the model or the plan in another case."""


@pytest.mark.grid(Grid({"case": range(len(CASES))}, heavy=lambda cell: cell["case"] in OTHERS))
def test_a_split_model_with_dropout_trains_as_on_one_process(case: int) -> None:
    build, plan = CASES[case]
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, existing(build))):
        agree(steps, expected(build), bound=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=4 zero=3", "dp=2 tp=2 sequence_parallel=1"])
def test_processes_draw_as_threads_do(processes: Processes, plan: str) -> None:
    for steps in run(4, trained, args=(plan, existing(gpt)), on=processes):
        agree(steps, expected(gpt), bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "tp=4 tp_mode=2d"])
def test_noise_of_a_models_own_is_the_same_under_every_plan(plan: str) -> None:
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, existing(noisy))):
        agree(steps, expected(noisy), bound=1e-9)


def test_one_token_for_two_ranks_has_the_masks_that_it_has_alone() -> None:
    given = [(tokens[:, :1], targets[:, :1]) for tokens, targets in batches()]

    def main(world: World) -> Any:
        trainer = parallelize(copy.deepcopy(existing(gpt)), "tp=2 sequence_parallel=1", world=world, **TRAINING)
        return outcome(trainer, batches=given)

    expected = alone(existing(gpt), batches=given, **TRAINING)
    for steps in run(2, main):
        agree(steps, expected, bound=1e-9)


def test_without_dropout_the_model_trains_to_something_else() -> None:
    quiet = alone(existing(gpt).eval(), batches=batches(), **TRAINING)
    existing(gpt).train()
    with pytest.raises(AssertionError, match="tensors differ"):
        agree(quiet, expected(gpt), bound=1e-3)


def begun(world: World, plan: str, folder: str) -> None:
    trainer = parallelize(copy.deepcopy(existing(gpt)), plan, world=world, **TRAINING)
    trainer.step(batches()[0])
    trainer.save(folder)


def resumed(world: World, plan: str, folder: str) -> Any:
    trainer = parallelize(copy.deepcopy(existing(gpt)), plan, world=world, **TRAINING)
    trainer.load(folder)
    return outcome(trainer, batches=batches()[1:])


def test_a_training_resumed_under_another_plan_draws_the_same(tmp_path: Path) -> None:
    folder = str(tmp_path / "step-1")
    run(2, begun, args=("dp=2 zero=1", folder))
    for steps in run(2, resumed, args=("tp=2", folder)):
        agree(steps, expected(gpt)[1:], bound=1e-9)


def with_local_draws(world: World) -> list[Tensor]:
    """What a rank has of the parameters that every rank has whole."""
    trainer = parallelize(copy.deepcopy(existing(gpt)), "tp=2 random=local", world=world, **TRAINING)
    trainer.step(batches()[0])
    return [parameter.detach() for name, parameter in trainer.model.named_parameters() if "norm" in name]


@pytest.mark.processes
def test_ranks_that_draw_locally_drop_the_same_of_what_they_all_have(processes: Processes) -> None:
    one, other = run(2, with_local_draws, on=processes)
    assert len(one) == 5
    assert all(map(torch.equal, one, other))


@pytest.mark.threads("it is about threads")
def test_threads_share_a_generator_and_cannot_draw_locally() -> None:
    with pytest.raises(ValueError, match=r"random=local draws from .* which threads share"):
        run(2, with_local_draws)
