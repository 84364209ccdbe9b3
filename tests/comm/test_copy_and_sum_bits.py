"""Test that copies and sums give the same bits for any number of threads."""

from collections.abc import Iterator
from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwise.comm.api.split_and_reduce import copy, elements, reduce_in_order

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads this rank computes with."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def given(dtype: torch.dtype, *, ranks: int, numel: int) -> list[Tensor]:
    """Values of very different sizes, so that another order of sums would be another result."""
    return [(torch.randn(numel, dtype=torch.float64) * 10 ** (5 - rank)).to(dtype) for rank in range(ranks)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 70_001])
def test_a_copy_has_the_same_bits(dtype: torch.dtype, numel: int) -> None:
    [x] = given(dtype, ranks=1, numel=numel)
    beside = torch.zeros(numel + 2, dtype=dtype)
    copy(x, into=beside[1:-1])
    assert torch.equal(beside[1:-1], x)
    assert not beside[0]
    assert not beside[-1]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks, numel", [(2, 5), (2, 300_001), (3, 200_003), (9, 40_001)])
def test_sums_are_added_in_the_order_of_the_ranks(dtype: torch.dtype, ranks: int, numel: int) -> None:
    xs = given(dtype, ranks=ranks, numel=numel)
    wide = [x.float() if dtype in (torch.bfloat16, torch.float16) else x.clone() for x in xs]
    expected = reduce(torch.add, wide).to(dtype)
    reduce_in_order(xs, into=xs[1], copies=[xs[0], *xs[2:]], op="sum")
    assert all(torch.equal(x, expected) for x in xs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_keep_what_is_not_a_number(op: str) -> None:
    xs = given(torch.float32, ranks=3, numel=200_000)
    xs[1][7] = torch.nan
    expected = reduce(torch.maximum if op == "max" else torch.minimum, [x.clone() for x in xs])
    reduce_in_order(xs, into=xs[0], copies=xs[1:], op=op)
    assert all(x[7].isnan() for x in xs)
    assert all(torch.equal(x.nan_to_num(), expected.nan_to_num()) for x in xs)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("threads")
def test_sums_that_overflow_give_no_warning() -> None:
    xs = [torch.full((200_000,), 3e38) for _ in range(2)]
    with np.errstate(all="raise"):
        reduce_in_order(xs, into=xs[0], copies=xs[1:], op="sum")
    assert all(x.isinf().all() for x in xs)


@pytest.mark.usefixtures("threads")
def test_sums_are_made_where_the_ranks_tensors_are_whatever_is_the_default() -> None:
    xs = [torch.ones(200_000) for _ in range(2)]
    with torch.device("meta"):
        reduce_in_order(xs, into=xs[0], copies=xs[1:], op="sum")
    assert all(torch.equal(x, torch.full((200_000,), 2.0)) for x in xs)


def test_numpy_adds_where_there_is_one_thread(threads: int) -> None:
    x = torch.ones(3)
    assert isinstance(elements(x, op="sum"), Tensor) == (threads > 1)
    assert isinstance(elements(x, op="max"), Tensor)
    assert isinstance(elements(x.bfloat16(), op="sum"), Tensor)
