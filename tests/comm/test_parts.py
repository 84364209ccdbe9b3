"""What a collective takes for a part."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor

from meshwise.comm.api.flat_parts import NOT_COPIED, flat

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def bare(dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # of what torch is about to drop
        return torch.empty(2, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_torch_copies_is_taken_and_no_other(dtype: torch.dtype) -> None:
    copied = False
    with contextlib.suppress(RuntimeError):
        bare(dtype).clone()
        copied = True
    assert copied == (dtype not in NOT_COPIED)
    if copied:
        assert flat(bare(dtype)).dtype == dtype


def test_a_torch_without_quantized_dtypes_will_do() -> None:
    """As torch says that a release to come will be."""
    script = "import torch; del torch.qint8, torch.quint4x2; import meshwise.comm.api.flat_parts"
    subprocess.run([sys.executable, "-c", script], check=True)
