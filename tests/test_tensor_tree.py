"""Test that trees of tensors, such as batches, are cut by rows."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import all_tensors, map_tensors, row_count, take_rows, tensors


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True)
class Sample:
    tokens: Tensor
    extra: list[Tensor]
    note: str = "kept"
    lengths: int = field(default=0, init=False)


def forest() -> list[Any]:
    """One batch of four rows in every container, and nested."""
    x = torch.arange(8).view(4, 2)
    y = torch.arange(4)
    flat = [x, (x, y), [x, y], {"x": x, "y": y}, Pair(x, y), Sample(x, [y]), OrderedDict(x=x, y=y)]
    return [*flat, {"deep": [Pair(x, {"y": (y, None, 3)}), Sample(x, [])], "label": "text"}]


@pytest.mark.parametrize("batch", forest(), ids=lambda batch: type(batch).__name__)
def test_rows_come_out_of_every_container_in_its_own_type(batch: Any) -> None:
    part = take_rows(batch, start=1, stop=3)
    assert type(part) is type(batch)
    assert row_count(batch) == 4
    assert row_count(part) == 2
    for whole, cut in zip(tensors(batch), tensors(part), strict=True):
        assert torch.equal(cut, whole[1:3])
        assert cut.data_ptr() == whole[1:].data_ptr()


def test_everything_but_the_tensors_is_kept() -> None:
    mapped = map_tensors(torch.neg, forest()[-1])
    assert mapped["label"] == "text"
    assert mapped["deep"][0].y["y"][1:] == (None, 3)
    assert mapped["deep"][1].note == "kept"


def test_the_parts_of_a_batch_are_the_batch() -> None:
    x = torch.arange(10).view(5, 2)
    cuts = [(0, 2), (2, 2), (2, 5)]
    assert torch.equal(torch.cat([take_rows(x, start=start, stop=stop) for start, stop in cuts]), x)


def test_a_part_may_be_empty() -> None:
    part = take_rows({"x": torch.ones(4, 2)}, start=4, stop=4)
    assert part["x"].shape == (0, 2)
    assert row_count(part) == 0


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": 1}, "a dict, holds no tensor"),
        (torch.tensor(1.0), r"shapes: \[\(\)\]"),
        ((torch.ones(2), torch.ones(3)), r"shapes: \[\(2,\), \(3,\)\]"),
    ],
)
def test_a_value_that_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_count(batch)


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 5)])
def test_rows_beyond_the_batch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"no rows {start} to {stop} in a batch of 4 rows"):
        take_rows(torch.ones(4), start=start, stop=stop)


def test_tensors_are_found_in_any_object_once_and_not_in_modules() -> None:
    class Anything:
        def __init__(self) -> None:
            self.kept, self.itself, self.model = {"a": [torch.ones(1)]}, self, nn.Linear(1, 1)

    anything = Anything()
    found = list(all_tensors((anything, [anything], {torch.zeros(2)}, "text", 3, None)))
    assert sorted(len(tensor) for tensor in found) == [1, 2]


def test_tuples_of_other_classes_keep_their_class() -> None:
    largest = torch.max(torch.eye(2), dim=1)
    mapped = map_tensors(lambda x: x + 1, {"size": torch.Size((2, 3)), "largest": largest})
    assert mapped["size"] == (2, 3)
    assert type(mapped["size"]) is torch.Size
    assert type(mapped["largest"]) is type(largest)
    assert mapped["largest"].values.tolist() == [2.0, 2.0]
