import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwise.testing import Disagreement, agree, difference


def outcome(**changes: Tensor) -> dict[str, Any]:
    weights = {"embed": torch.arange(1.0, 7.0).view(2, 3).double(), "head": torch.ones(4).double()}
    return {"loss": 2.5, "gradients": weights | changes}


def test_equal_outcomes_agree() -> None:
    agree(outcome(), outcome(), bound=0.0)


def test_a_difference_at_the_bound_agrees_and_above_it_does_not() -> None:
    near = outcome()["gradients"]["embed"] + 3e-9
    agree({"embed": near}, {"embed": outcome()["gradients"]["embed"]}, bound=1e-9)
    with pytest.raises(Disagreement):
        agree({"embed": near}, {"embed": outcome()["gradients"]["embed"]}, bound=0.9e-10)


def test_the_message_names_the_first_tensor_its_difference_and_the_index() -> None:
    wrong = outcome()["gradients"]["embed"].clone()
    wrong[1, 0] += 3.0
    with pytest.raises(Disagreement) as caught:
        agree(outcome(embed=wrong, head=torch.zeros(4).double()), outcome(), bound=1e-9)
    assert str(caught.value).splitlines() == [
        "gradients · embed: relative difference 0.5, bound 1e-09",
        "  7 in parallel and 4 alone at [1, 0]",
        "  2 of 3 tensors differ, the first of them:",
        "    gradients · embed  0.5",
        "    gradients · head   1",
    ]


def test_a_number_is_compared_like_a_tensor() -> None:
    with pytest.raises(Disagreement, match=r"loss: relative difference 0.2, bound"):
        agree({"loss": 3.0}, {"loss": 2.5}, bound=0.1)


def test_steps_are_numbered() -> None:
    with pytest.raises(Disagreement, match=r"^1 · loss: "):
        agree([{"loss": 1.0}, {"loss": 2.0}], [{"loss": 1.0}, {"loss": 1.0}], bound=1e-9)


def test_missing_and_extra_tensors_are_named() -> None:
    left, right = outcome(tail=torch.ones(1)), outcome(bias=torch.ones(1))
    with pytest.raises(Disagreement, match=r"(?s)only alone: gradients · bias\n.*only in parallel: gradients · tail"):
        agree(left, right, bound=1.0)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(Disagreement, match=r"gradients · head has shape \(3,\) in parallel and \(4,\) alone"):
        agree(outcome(head=torch.ones(3)), outcome(), bound=1.0)


def test_a_leaf_that_is_no_tensor_or_number_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"gradients · head is a NoneType"):
        agree({"gradients": {"head": None}}, {"gradients": {"head": None}}, bound=1.0)


def test_rounding_in_a_family_of_large_tensors_is_no_difference() -> None:
    noise = {"key.bias": torch.tensor([1e-18]).double(), "embed": torch.ones(1).double()}
    other = {"key.bias": torch.tensor([-2e-18]).double(), "embed": torch.ones(1).double()}
    agree(noise, other, bound=1e-9)
    with pytest.raises(Disagreement, match=r"key\.bias"):
        agree({"key.bias": noise["key.bias"]}, {"key.bias": other["key.bias"]}, bound=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_infinity_never_agrees_with_a_finite_number(bad: float) -> None:
    one, other = torch.ones(3).double(), torch.tensor([1.0, bad, 1.0]).double()
    assert difference(other, one).relative == math.inf
    assert difference(one, other).relative == math.inf
    assert difference(other, one).index == (1,)


def test_a_nan_never_agrees_not_even_with_itself() -> None:
    nan = torch.tensor([math.nan])
    assert difference(nan, nan).relative == math.inf


def test_anything_but_zero_differs_infinitely_from_zero() -> None:
    assert difference(torch.tensor([0.0, 1e-300], dtype=torch.float64), torch.zeros(2).double()).relative == math.inf
    assert difference(torch.zeros(2), torch.zeros(2)).relative == 0.0


def test_shapes_that_differ_have_no_difference() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) cannot be compared with \(3,\)"):
        difference(torch.zeros(2), torch.zeros(3))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.data())
def test_the_relative_difference_is_the_largest_difference_over_the_largest_value(
    values: list[float], data: st.DataObject
) -> None:
    others = data.draw(st.lists(st.floats(-1e3, 1e3), min_size=len(values), max_size=len(values)))
    found = difference(torch.tensor(others, dtype=torch.float64), torch.tensor(values, dtype=torch.float64))
    largest = max(abs(a - b) for a, b in zip(others, values, strict=True))
    scale = max(map(abs, values))
    assert found.relative == (0 if largest == 0 else largest / scale if scale else math.inf)
    assert abs(found.value - found.expected) == largest
