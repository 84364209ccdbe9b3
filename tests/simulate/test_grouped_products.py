"""Products of groups, as mixtures of experts are made of, count as the products that they are, in every dtype."""

import pytest
import torch
from torch import Tensor, nn

from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import MatrixProduct, TapeOperation

EXPERTS, WIDTH, INNER, ROWS = 4, 16, 24, 32


class Mixture(nn.Module):
    """A matrix for each expert, of which each has a part of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.matrices = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.full((EXPERTS,), ROWS // EXPERTS, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x * self.scale, self.matrices, offs=ends)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.float().square().sum(), len(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_of_three_products_has_the_flops_of_all_rows(dtype: torch.dtype) -> None:
    subject = RehearsalSubject(lambda: Mixture().to(dtype), loss, torch.empty(ROWS, WIDTH, dtype=dtype))
    step = rehearse(subject, plan="dp=1", ranks=1).steps[0]
    entries = [entry for segment in step for entry in segment.entries if isinstance(entry, TapeOperation)]
    found = [one for one in entries if one.name == "_grouped_mm"]
    assert {one.flops for one in found} == {2 * ROWS * WIDTH * INNER}
    assert {one.dtype for one in found} == {str(dtype).removeprefix("torch.")}
    forward, *backward = (one.product for one in found)
    assert forward == MatrixProduct(1, ROWS, WIDTH, INNER)
    of_input, of_matrices = MatrixProduct(1, ROWS, INNER, WIDTH), MatrixProduct(EXPERTS, WIDTH, ROWS // EXPERTS, INNER)
    assert set(backward) == {of_input, of_matrices}
