"""A model whose blocks are recomputed: ties, dropout of two kinds, an activation in place; and how it is trained."""

import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.thread_world import run_threads
from meshwise.comm.world import World
from meshwise.parallelize import Options, parallelize
from meshwise.plan import Plan

WIDTH, TOKENS, WORDS, LAYERS, STEPS = 16, 4, 32, 2, 2


Outcome: TypeAlias = tuple[Any, dict[str, Tensor], dict[str, str]]


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

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
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


def train(world: World, plan: str, *, rows: int = 8, steps: int = STEPS) -> Outcome:
    """Losses and norms, parameters after the last step, and how the blocks were recomputed then."""
    given = batches(rows)[:steps]
    options = Options(example=given[0], clip_norm=0.5)
    trainer = parallelize(Model, plan, loss=loss, world=world, lr=1e-2, options=options)
    numbers = [(result.loss, result.grad_norm) for result in map(trainer.step, given)]
    values = {name: value.clone() for name, value in trainer.full_parameters()}
    modes = dict(trainer.blocks.modes)
    trainer.close()
    return numbers, values, modes


def on(plan: str, *, rows: int = 8, steps: int = STEPS) -> list[Outcome]:
    run = functools.partial(train, rows=rows, steps=steps)
    return run_threads(Plan.parse(plan).mesh().size, run, args=(plan,))
