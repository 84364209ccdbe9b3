"""What is rehearsed in these tests: small models, the same on every rank."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.reference import MixtureConfig, MixtureGPT
from meshwise.reference.gpt import GPT, GPTConfig
from meshwise.simulate.rehearsal import RehearsalSubject

CONFIG = GPTConfig(vocabulary=64, context=16, layers=2, heads=4, width=32)
DEEP = replace(CONFIG, layers=4)


def loss(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def gpt_subject(config: GPTConfig = CONFIG, *, rows: int = 16, stages: int = 1, **options: object) -> RehearsalSubject:
    """A GPT; with stages, the layers are cut evenly among them."""
    tokens = torch.zeros(rows, config.context, dtype=torch.long)
    at = tuple(f"blocks.{stage * config.layers // stages}" for stage in range(1, stages))
    chosen = Options(cut=CutOptions(at=at), example=(tokens, tokens), **options)  # type: ignore[arg-type]
    return RehearsalSubject(lambda: GPT(config), loss, (tokens, tokens), options=chosen)


def mixture_subject(*, rows: int = 16, **changed: int) -> RehearsalSubject:
    """A GPT of two blocks with eight experts each."""
    sizes = {"vocabulary": 64, "context": 16, "layers": 2, "heads": 4, "width": 32, "experts": 8, **changed}
    config = MixtureConfig(**sizes)  # type: ignore[arg-type]
    tokens = torch.empty(rows, config.context, dtype=torch.long, device="meta")
    batch = (tokens, tokens)
    return RehearsalSubject(lambda: MixtureGPT(config), loss, batch, options=Options(example=batch))
