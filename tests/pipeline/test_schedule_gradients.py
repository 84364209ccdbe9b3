"""Every schedule, with stages of a GPT, gives the gradients of one process: tables, cut and split backward fit.

The walk of a table is run action by action in one process; messages are copied, as a transfer would."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.pipeline.cut.model_cut import CutRequest, cut_model
from meshwise.pipeline.run.schedule_interpreter import pack, unpack
from meshwise.pipeline.run.stage_backward import WeightBackward, backward_input
from meshwise.pipeline.run.stage_forward import Stage, make_stage
from meshwise.pipeline.schedules.named_schedules import SCHEDULES, make_schedule
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, lower, walk
from meshwise.reference import GPT, GPTConfig, next_token_loss
from pipeline.oracle import gradients

pytestmark = pytest.mark.usefixtures("float64")

TOKENS = torch.arange(4 * 2 * 12).reshape(4, 2, 12) * 7 % 31


def lm(model: nn.Module, index: int) -> Tensor:
    tokens = TOKENS[index]
    return next_token_loss(model(tokens), (tokens, tokens.roll(-1, dims=1)))[0]


class OneProcess:
    """Does the actions of a table: and holds what ranks hold between them."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages
        self.arrived: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.received: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        self.returned: dict[tuple[int, int], list[Tensor]] = {}
        self.weights: dict[tuple[int, int], WeightBackward] = {}

    def do(self, action: Action) -> None:
        if action.microbatch is None:
            return
        place = (action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            self.forward(*place)
        elif action.kind in (ActionKind.I, ActionKind.B):
            self.backward(*place)
        if action.kind in (ActionKind.W, ActionKind.B):
            self.weights.pop(place).run()

    def forward(self, stage: int, index: int) -> None:
        result = self.stages[stage].run(lambda model: lm(model, index), received=self.received[stage, index])
        if stage + 1 == len(self.stages):
            self.outputs[stage, index] = [result]
            return
        skeleton, parts = pack(result)
        after = (stage + 1, index)
        self.outputs[stage, index] = list(parts)
        self.arrived[after] = [t.detach().clone().requires_grad_() for t in parts]
        self.received[after] = unpack(skeleton, arrived=self.arrived[after])

    def backward(self, stage: int, index: int) -> None:
        outputs, leaves = self.outputs.pop((stage, index)), self.arrived.pop((stage, index), [])
        self.weights[stage, index] = backward_input(
            outputs,
            gradients=self.returned.pop((stage, index), [torch.ones(())]),
            received=leaves,
            parameters=self.stages[stage].module.parameters(),
        )
        self.returned[stage - 1, index] = [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_gradients_of_one_process(name: str, tied: bool) -> None:
    model = GPT(GPTConfig(vocabulary=31, context=12, layers=4, heads=2, width=8, tied=tied))
    schedule = lower(make_schedule(name, pp=2, microbatches=4), gathers=True)
    call = lambda model: lm(model, 0)  # noqa: E731
    cut = cut_model(model, stages=schedule.stages, call=call, request=CutRequest("params"))
    stages = [make_stage(model, cut=cut, index=index) for index in range(cut.stages)]
    for index in range(4):
        lm(model, index).backward()
    expected = gradients(model)
    one = OneProcess(stages)
    for _, action in walk(schedule):
        one.do(action)
    assert not one.outputs
    assert not one.weights
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-15)
