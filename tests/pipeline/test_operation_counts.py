"""Operations of a model on the meta device are counted in place of time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.pipeline.cut import probe as probing
from meshwise.pipeline.cut.probe import probe, profile_module


class Repeated(nn.Module):
    """One matrix, applied so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
        return x


def test_operations_of_equal_pieces_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), *(Repeated(times) for times in (1, 1, 3, 1)))
    counted: list[bool] = []

    def watched(*given: Any, timed: bool, **named: Any) -> Any:
        counted.append(timed)
        return profile_module(*given, timed=timed, **named)

    monkeypatch.setattr(probing, "profile_module", watched)
    seen = probe(model, call=lambda model: model(torch.ones(2, 4)).sum(), timed=True)
    product = 2 * 2 * 4 * 4
    assert [step.cost.work for step in seen.calls] == [2 * product, 3 * product, 3 * product, 9 * product, 3 * product]
    assert counted == [True, True, False, True, False]


class Quiet(Repeated):
    """Keeps as much, however often it applies its matrix."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return x * y


def test_pieces_with_equal_memory_and_more_operations_are_counted_separately() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), *(Quiet(times) for times in (1, 1, 3)))
    seen = probe(model, call=lambda model: model(torch.ones(2, 4)).sum(), timed=True)
    one, again, three = (step.cost for step in seen.calls[1:])
    assert (one, three.activations, three.work) == (again, one.activations, 3 * one.work)
