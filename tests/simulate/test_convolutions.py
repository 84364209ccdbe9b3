"""A convolution is a matrix product, of windows and the weight, and takes as long as one."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from meshwise.simulate.step_tape import MatrixProduct, TapeOperation

CLUSTER = parse_cluster("1x1 h100")


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def operations(model: nn.Module, batch: Tensor) -> dict[str, TapeOperation]:
    step = rehearse(RehearsalSubject(model, loss, batch), plan="dp=1", ranks=1).steps[0]
    found = [entry for segment in step for entry in segment.entries if isinstance(entry, TapeOperation)]
    return {one.name: one for one in found if one.product is not None}


@pytest.mark.parametrize(
    "layer, shape, product",
    [
        (nn.Conv2d(16, 32, 3, padding=1), (4, 16, 8, 8), MatrixProduct(1, 4 * 64, 16 * 9, 32)),
        (nn.Conv2d(16, 32, 4, stride=4), (4, 16, 8, 8), MatrixProduct(1, 4 * 4, 16 * 16, 32)),
        (nn.Conv2d(16, 32, 3, padding=1, groups=4), (4, 16, 8, 8), MatrixProduct(4, 4 * 64, 4 * 9, 8)),
        (nn.Conv1d(16, 16, 5, groups=16), (4, 16, 12), MatrixProduct(16, 4 * 8, 5, 1)),
        (nn.ConvTranspose2d(16, 32, 2, stride=2), (4, 16, 8, 8), MatrixProduct(1, 4 * 64, 16, 32 * 4)),
        (nn.ConvTranspose1d(16, 32, 3, groups=2), (4, 16, 12), MatrixProduct(2, 4 * 12, 8, 16 * 3)),
    ],
)
def test_a_convolution_has_the_sizes_of_a_product(
    layer: nn.Module, shape: tuple[int, ...], product: MatrixProduct
) -> None:
    found = operations(layer, torch.empty(shape))
    assert found["convolution"].product == found["convolution_backward"].product == product
    assert found["convolution"].flops == 2 * product.batch * product.m * product.k * product.n


def test_a_convolution_of_one_pixel_takes_what_the_linear_layer_takes() -> None:
    rows, width = 4096, 512
    (one,) = [
        op for name, op in operations(nn.Conv2d(width, width, 1), torch.empty(rows, width, 1, 1)).items()
        if name == "convolution"
    ]  # fmt: skip
    other = operations(nn.Linear(width, width), torch.empty(rows, width))["addmm"]
    same = dataclasses.replace(one, bytes=other.bytes)  # a bias is read here, and added there
    assert CostModel(CLUSTER).seconds(same) == CostModel(CLUSTER).seconds(other)


def test_no_more_of_the_peak_is_used_than_there_is() -> None:
    model = nn.Sequential(*(nn.Conv2d(512, 512, 3, padding=1) for _ in range(4)))
    rehearsal = rehearse(
        RehearsalSubject(model, loss, torch.empty(512, 512, 32, 32)), plan="dp=1", ranks=1, device="cuda"
    )
    assert 0.1 < predict(rehearsal, cluster=CLUSTER).utilisation < 1
