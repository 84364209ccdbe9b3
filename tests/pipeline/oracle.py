"""Run stages one after the other in one process, to compare a cut with the model; and a language model to cut."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.run.schedule_interpreter import pack, tensor_specs, unpack
from meshwise.pipeline.run.stage_forward import Stage, make_stage
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree

Call = Callable[[nn.Module], Any]

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 31
TARGETS = TOKENS.roll(-1, dims=1)


def gpt(**config: Any) -> GPT:
    """Seven pieces."""
    return GPT(GPTConfig(vocabulary=31, context=12, layers=4, heads=2, width=8, **config))


def lm(model: nn.Module) -> Tensor:
    """Its loss on the example."""
    return next_token_loss(model(TOKENS), (TOKENS, TARGETS))[0]


def run_stages(stages: list[Stage], call: Call) -> Tensor:
    """The last stage's result, after forwards and backwards through all; what crosses is copied, as by a transfer."""
    received: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    result: Any = None
    crossed = []
    for stage in stages:
        result, shapes = stage.run(call, received=received, shapes=shapes), stage.state.shapes
        if stage is not stages[-1]:
            skeleton, parts = pack(result)
            arrived = [
                tensor.detach().clone().requires_grad_(spec.requires_grad)
                for tensor, spec in zip(parts, tensor_specs(skeleton), strict=True)
            ]
            received = unpack(skeleton, arrived=arrived)
            crossed.append((parts, arrived))
    result.backward()
    for sent, arrived in reversed(crossed):
        pairs = [(s, a.grad) for s, a in zip(sent, arrived, strict=True) if a.grad is not None]
        if pairs:
            torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
    detached: Tensor = result.detach()
    return detached


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, taken away."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def is_the_model(model: nn.Module, call: Call, cut: ModelCut) -> list[Stage]:
    """Check that the stages give the model's result and all its gradients to 1e-12, and return them."""
    stages = [make_stage(model, cut=cut, index=index) for index in range(cut.stages)]
    whole = call(model)
    whole.backward()
    expected = gradients(model)
    result = run_stages(stages, call)
    torch.testing.assert_close(result, whole.detach(), rtol=1e-12, atol=0)
    agree(gradients(model), expected, bound=1e-12)  # of the largest of a tensor: gradients of keys' biases are zero
    return stages
