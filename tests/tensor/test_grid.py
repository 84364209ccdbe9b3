"""Every scheme, with ZeRO, replicas and dropout, trains models as one process does: two steps of AdamW with clipping,
in float64, to 1e-9.

The whole product is run by `make grid`; `make test` runs cells of it that have each pair of values."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Cell, Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, run
from tensor.exact import with_exact_norms

VOCABULARY, TOKENS, WIDTH, HEADS, HIDDEN, LAYERS = 19, 5, 16, 4, 24, 2
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
UNEVEN, EVEN = (8, 3), (8, 16)
"""Rows of the two batches."""


class Encoder(nn.Module):
    """torch's own encoder over an embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layers(self.embedding(tokens)))


def build(model: str, dropout: float) -> nn.Module:
    if model == "gpt":
        return GPT(GPTConfig(VOCABULARY, TOKENS, LAYERS, HEADS, width=WIDTH, mlp_ratio=1.6, tied=True, dropout=dropout))
    if model == "encoder":
        return Encoder(dropout)
    transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    shape = {**SHAPE, "vocab_size": VOCABULARY, "attention_dropout": dropout, "max_position_embeddings": TOKENS}
    if model == "llama":
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
        return with_exact_norms(transformers.LlamaForCausalLM(config))
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    found: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**shape, **dropouts))
    return found


@functools.cache
def existing(model: str, dropout: float) -> nn.Module:
    torch.manual_seed(3)
    return build(model, dropout).double()


def forward(model: nn.Module, batch: Any) -> Any:
    output = model(batch[0])
    return output if isinstance(output, Tensor) else output.logits


TRAINING: dict[str, Any] = {
    "loss": next_token_loss,
    "options": Options(clip_norm=0.5, forward=forward, seed=4),
    "lr": 1e-2,
    "weight_decay": 0.1,
}


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator) for rows in sizes]
    return [(tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 4, -100)) for tokens in drawn]


@functools.cache
def expected(model: str, dropout: float, sizes: tuple[int, ...]) -> Any:
    steps = alone(existing(model, dropout), batches=batches(sizes), **TRAINING)
    every = [{name: step[name] for name in ("loss", "grad_norm", "tokens")} for step in steps]
    return every, {name: steps[-1][name] for name in ("gradients", "parameters")}


def trained(world: World, plan: str, model: nn.Module, sizes: tuple[int, ...]) -> Any:
    trainer = parallelize(copy.deepcopy(model), plan, world=world, **TRAINING)
    steps = [trainer.step(batch) for batch in batches(sizes)]
    every = [{"loss": step.loss, "grad_norm": step.grad_norm, "tokens": step.tokens} for step in steps]
    found = {"gradients": trainer.full_gradients(), "parameters": trainer.full_parameters()}
    return every, {kind: {name: tensor.clone() for name, tensor in named} for kind, named in found.items()}


GRID = Grid(
    {
        "model": ("gpt", "encoder", "llama", "bert"),
        "scheme": (
            "tp=2",
            "tp=4",
            "tp=2 sequence_parallel=1",
            "tp=4 sequence_parallel=1",
            "tp=4 tp_mode=2d",
            "tp=8 tp_mode=2.5d tp_depth=2",
            "tp=8 tp_mode=3d",
        ),
        "zero": (0, 1, 3),
        "dp": (1, 2),
        "dropout": (0.0, 0.3),
    },
    cost=lambda cell: 1 + abs(ranks_of(_plan(cell)) - 4),  # two replicas where two ranks split the model
    strength=1,  # each model under each scheme is in test_hf.py, dropout under each in test_dropout.py
    heavy=lambda cell: ranks_of(_plan(cell)) > 8,
)


def _plan(cell: Cell) -> str:
    return f"{cell['scheme']} dp={cell['dp']} zero={cell['zero']}"


@pytest.mark.grid(GRID)
def test_two_steps_are_those_of_one_process(model: str, scheme: str, zero: int, dp: int, dropout: float) -> None:
    plan = f"{scheme} dp={dp} zero={zero}"
    counts_rows = model in ("llama", "bert")  # in its forward, under 3d those of the input and not those within
    sizes = EVEN if counts_rows and "3d" in scheme else UNEVEN
    for found in run(Plan.parse(plan).mesh().size, trained, args=(plan, existing(model, dropout), sizes)):
        agree(found, expected(model, dropout, sizes), bound=1e-9)
