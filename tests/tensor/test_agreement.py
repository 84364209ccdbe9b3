"""A split GPT and a plain one compute the same, whatever the scheme, with sizes that do not divide."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.tensor.matmul import Streaming
from tensor.splitting import SCHEMES, gpt_parts, split_agrees

UNEVEN = GPTConfig(vocabulary=13, context=7, layers=2, heads=3, width=9, mlp_ratio=1.6, bias=True)


def built(config: GPTConfig) -> nn.Module:
    torch.manual_seed(1)
    module = GPT(config).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return module


def tokens(rows: int, config: GPTConfig) -> list[Tensor]:
    torch.manual_seed(2)
    inputs, targets = torch.randint(0, config.vocabulary, (2, rows, config.context))
    targets[0, :2] = -100
    return [inputs, targets]


def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return next_token_loss(module(inputs), (inputs, targets))[0]


@pytest.mark.parametrize("streaming", [Streaming(), Streaming(keep=True), Streaming(panels=3)], ids=str)
@pytest.mark.parametrize("plan", SCHEMES.values(), ids=SCHEMES)
def test_the_loss_and_every_gradient_are_those_of_one_process(plan: str, streaming: Streaming) -> None:
    split_agrees(
        built(UNEVEN),
        plan=plan,
        parts=gpt_parts(UNEVEN),
        batch=(tokens(5, UNEVEN), loss),
        streaming=streaming,
    )
