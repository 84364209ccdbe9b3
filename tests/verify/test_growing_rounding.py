"""Where a model multiplies rounding errors beyond 1e-9, verify measures in float64 too what rounding explains."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from meshwise.data_parallel import batch_norm_statistics
from meshwise.verify import verify


def build() -> nn.Module:
    """Return a model that divides the differences between rows, 1e-8 of the values, by their deviation."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, eps=1e-30), nn.ReLU(), nn.Linear(16, 4))


def squares(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(2, 4, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [(1 + 1e-8 * x, target[:, :4]) for x, target in rows]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
def test_a_difference_that_rounding_explains_is_no_fault(plan: str) -> None:
    report = verify(build, squares, batches(), plan, lr=1e-3)
    assert report.ok, report
    assert "bound max(1e-09, 16 x effect of one eps in the parameters)" in str(report)
    assert "the run was repeated, with bounds measured from rounding" in str(report)


def test_a_fault_in_such_a_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = batch_norm_statistics.BatchStatistics
    monkeypatch.setattr(statistics, "_remember", lambda *_: None)  # running statistics are not updated
    assert not verify(build, squares, batches(), "dp=2", lr=1e-3).ok


def test_bounds_of_other_models_are_not_measured() -> None:
    rows = [(torch.randn(4, 6), torch.randn(4, 4)) for _ in range(2)]
    report = verify(build, squares, rows, "dp=2", lr=1e-3)
    assert report.ok
    assert "bound 1e-09" in report.setting
