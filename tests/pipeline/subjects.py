"""Models for the grid of pipelines: as small as possible for so many stages, with batches and a loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.reference import GPT, GPTConfig, next_token_loss
from reference.convolutional import ResNet
from tensor.exact import with_exact_norms

VOCABULARY, TOKENS, WIDTH, HEADS = 11, 3, 8, 2


@dataclass(frozen=True)
class Subject:
    """Model of `stages` pieces or more, with its training data and loss."""

    build: Callable[[int], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    forward: Callable[[nn.Module, Any], Any] | None = None
    where: CutOptions = field(default_factory=CutOptions)
    rules: dict[str, str] | None = None
    deferred: bool = True
    """Whether it is handed over as a function; otherwise as a module with its values."""


def gpt(stages: int, *, tied: bool) -> nn.Module:
    layers = max(2, stages - 2)
    return GPT(GPTConfig(VOCABULARY, TOKENS, layers, HEADS, width=WIDTH, mlp_ratio=1.5, tied=tied, bias=True)).double()


def llama(stages: int) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")
    shape = {"hidden_size": WIDTH, "intermediate_size": 12, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = transformers.LlamaConfig(**shape, vocab_size=VOCABULARY, num_hidden_layers=max(2, stages - 2))
    return with_exact_norms(transformers.LlamaForCausalLM(config)).double()


def t5(stages: int) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")
    shape = {"d_model": WIDTH, "d_kv": 4, "d_ff": 12, "num_heads": HEADS, "num_layers": max(1, stages // 2 - 1)}
    config = transformers.T5Config(**shape, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0)
    return with_exact_norms(transformers.T5ForConditionalGeneration(config)).double()


def tokens(rows: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(1, VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].clone()


def images(rows: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    pixels = torch.randn(rows, 3, 4, 4, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (rows,), generator=generator)


def classes(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


def logits_of(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], use_cache=False).logits


def logits_of_pair(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], decoder_input_ids=batch[0].flip(1), use_cache=False).logits


SUBJECTS = {
    "gpt": Subject(lambda stages: gpt(stages, tied=False), tokens, next_token_loss),
    "tied": Subject(lambda stages: gpt(stages, tied=True), tokens, next_token_loss, deferred=False),
    "resnet": Subject(
        lambda stages: ResNet(1 if stages < 8 else 2).double(),
        images,
        classes,
        rules={"stem.*": "whole", "layer*.*.*": "whole", "head": "head"},
    ),
    "llama": Subject(llama, tokens, next_token_loss, forward=logits_of),
    "t5": Subject(t5, tokens, next_token_loss, forward=logits_of_pair, deferred=False),
}


class TiedDecoder(nn.Module):
    """Blocks between an embedding and a head that has its matrix."""

    def __init__(self, block: Callable[[], nn.Module], *, layers: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
