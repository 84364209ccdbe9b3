"""Test that the reported place of an error is a line of the user's code."""

import contextlib
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwise.comm.api.flight_recorder import raised_at
from meshwise.plan import Plan


def in_torch() -> None:
    nn.Linear(2, 2)(torch.zeros(3))


def in_meshwise() -> None:
    Plan.parse("dp=1 nonsense=2")


def in_python() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.nullcontext())
        stack.callback(functional.linear, torch.zeros(3), torch.zeros(2, 2))


@pytest.mark.parametrize("fails", [in_torch, in_meshwise, in_python])
def test_the_line_of_the_user_is_named(fails: FunctionType) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        fails()
    assert raised_at(caught.value).startswith(f"{__file__}:")
    assert raised_at(caught.value).endswith(f" {fails.__name__}")
