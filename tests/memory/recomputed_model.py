"""The model that the tests of recomputation train: ties, dropout of two kinds, an activation in place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise import testing
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan

T = TypeVar("T")
WIDTH, TOKENS, WORDS, LAYERS, STEPS = 16, 4, 32, 2, 3


Outcome: TypeAlias = dict[str, Tensor]
"""Loss, norm and gradients of a step, by name."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """With dropout of two kinds, an activation in place, and a tensor beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.drop(self.down(self.relu(self.up(self.second(x))))) * scale  # type: ignore[no-any-return]


class Model(nn.Module):
    """Tied at its ends."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def batches(rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    drawn = [torch.randint(WORDS, (rows, TOKENS + 1), generator=draws) for _ in range(STEPS)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def under(
    world: World, plan: str, *, layers: int = LAYERS, rows: int = 8, cut: CutOptions | None = None, **arguments: Any
) -> Trainer:
    options = Options(example=batches(rows)[0], clip_norm=0.5, cut=cut or CutOptions())
    build = functools.partial(Model, layers)
    return parallelize(build, plan, loss=loss, world=world, options=options, **{"lr": 1e-2} | arguments)


def outcome(trainer: Trainer, batch: Any) -> Outcome:
    """Of one step."""
    result = trainer.step(batch)
    found = {"loss and norm": torch.tensor([result.loss, result.grad_norm], dtype=torch.float64)}
    return found | {name: value.clone() for name, value in trainer.full_gradients()}


def in_modes(world: World, plan: str, *, modes: Sequence[str], layers: int, rows: int) -> dict[str, Outcome]:
    """One and the same step, its blocks recomputed in one mode after another."""
    trainer = under(world, f"{plan} recompute=full", layers=layers, rows=rows, lr=0.0)
    assert any(world.exchange(trainer.blocks.modes))  # a stage may have no block
    found = {}
    for mode in modes:
        trainer.blocks.set_modes(dict.fromkeys(trainer.blocks.modes, mode))
        trainer._stepping._steps = 0  # a model draws by the number of the step
        found[mode] = outcome(trainer, batches(rows)[0])
    trainer.close()
    return found


def on(plan: str, run: Callable[..., T], **arguments: Any) -> list[T]:
    """What every rank of the plan comes to."""
    ranks = Plan.parse(plan).mesh().size
    return testing.run(ranks, functools.partial(run, **arguments), args=(plan,))
