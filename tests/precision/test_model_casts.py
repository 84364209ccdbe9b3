"""Test that the mode which converts products on a GPU ends where no product needs it, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from meshwise.precision.dtype_policy import PRECISIONS, ModelCasts, ProductCasts, convert, product_dtype

WIDTH = 4


class Model(nn.Module):
    """Two layers, and a product of its own with a table in fp32 (`rotary`); a third layer runs only for some inputs."""

    table: Tensor

    def __init__(self, *, rotary: bool) -> None:
        super().__init__()
        self.first, self.second, self.rare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("table", torch.eye(WIDTH))
        self.rotary = rotary
        self.modes = list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        """x (samples, 4) -> the same shape."""
        self.modes.append(any(isinstance(mode, ProductCasts) for mode in _get_current_function_mode_stack()))
        y: Tensor = self.second(self.first(x))
        if self.rotary:
            y = y @ self.table
        if x[0, 0] > 1:
            y = self.rare(y) @ self.table
        return y


@pytest.fixture
def made() -> tuple[Model, ModelCasts]:
    return casted(rotary=False)


def casted(*, rotary: bool) -> tuple[Model, ModelCasts]:
    model, casts = Model(rotary=rotary), ModelCasts(PRECISIONS["bf16"], device=torch.device("cuda"))
    convert(model, precision=PRECISIONS["bf16"])
    casts.hook(model)
    return model, casts


def run(model: Model, casts: ModelCasts, *, first: float) -> Tensor:
    x = torch.full((2, WIDTH), first)
    with casts.forward(model, batch=x):
        out: Tensor = model(x)
    return out


def test_the_mode_ends_when_every_module_has_run_without_it(made: tuple[Model, ModelCasts]) -> None:
    model, casts = made
    casts._hooks.pop()  # of the layer that does not run
    assert run(model, casts, first=0.5).dtype == torch.bfloat16
    run(model, casts, first=0.5)
    with torch.no_grad():
        run(model, casts, first=0.5)
        run(model, casts, first=0.5)
    assert model.modes == [True, False, True, False]


def test_a_product_that_is_converted_keeps_the_mode() -> None:
    model, casts = casted(rotary=True)
    for first in (2.0, 0.5, 2.0):
        assert run(model, casts, first=first).dtype == torch.bfloat16
    assert model.modes == [True] * 3


def test_a_module_that_has_not_run_keeps_the_mode(made: tuple[Model, ModelCasts]) -> None:
    model, casts = made
    for first in (0.5, 0.5, 2.0, 0.5):
        assert run(model, casts, first=first).dtype == torch.bfloat16
    assert model.modes == [True] * 4


def test_another_batch_and_another_mode_begin_with_the_mode(made: tuple[Model, ModelCasts]) -> None:
    model, casts = made
    casts._hooks.pop()  # of the layer that does not run
    x = torch.full((2, WIDTH), 0.5)
    for batch, training in ((x, True), ((x, x), True), (x, False), (x, True), (model, True), (model, True)):
        with casts.forward(model.train(training), batch=batch):
            model(x)
    assert model.modes == [True, True, True, False, True, True]


def test_a_split_layer_that_asks_for_the_dtype_keeps_the_mode(made: tuple[Model, ModelCasts]) -> None:
    model, casts = made
    asked = list[object]()
    model.first.register_forward_hook(lambda *_: asked.append(product_dtype("cuda")))
    casts._hooks.pop()  # of the layer that does not run
    run(model, casts, first=0.5)
    run(model, casts, first=0.5)
    assert asked == [torch.bfloat16] * 2
