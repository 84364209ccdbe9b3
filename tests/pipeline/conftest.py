"""Fixtures for the tests of cuts and stages."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Models are made in float64: `pytestmark = pytest.mark.usefixtures("float64")`."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
