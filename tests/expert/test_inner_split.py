"""Test how the matrices of experts are split over `etp`, and which experts are refused."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from meshwise.expert.expert_parallel import inner_split
from meshwise.layout.layout import ANYWHERE, DimSplit
from meshwise.model.find_mixtures import find_mixtures
from meshwise.plan import PlanError


class Experts(nn.Module):
    """Parameters of these shapes, by name, and these attributes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], **attributes: bool) -> None:
        super().__init__()
        self.num_experts = 4
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


def split(experts: nn.Module) -> dict[str, tuple[int, DimSplit]]:
    [(name, mixture)] = find_mixtures(nn.ModuleDict({"experts": experts})).items()
    return dict(inner_split(experts, mixture=mixture, name=name).cuts)


def test_the_inner_dim_is_found_by_sizes_or_by_an_attribute() -> None:
    gated = {"gate_up": (4, 12, 8), "down": (4, 8, 6)}
    assert split(Experts(gated)) == {"gate_up": (1, DimSplit((6, 6))), "down": (2, ANYWHERE)}
    assert split(Experts(gated, is_concatenated=False))["gate_up"] == (1, DimSplit(grain=2))
    turned = {"gate_up": (4, 8, 12), "bias_of_all": (4, 8), "down": (4, 6, 8)}
    assert split(Experts(turned)) == {"gate_up": (2, DimSplit((6, 6))), "down": (1, ANYWHERE)}
    square = {"up": (4, 8, 8), "up_bias": (4, 8), "down": (4, 8, 8)}
    assert split(Experts(square, is_transposed=True)) == {
        "up": (2, ANYWHERE),
        "down": (1, ANYWHERE),
        "up_bias": (1, ANYWHERE),
    }


REFUSED = {
    "do not show which dim is the inner one": {"up": (4, 8, 8), "down": (4, 8, 8)},
    "other parameters than two matrices": {"w1": (4, 8, 6), "w2": (4, 6, 8), "w3": (4, 8, 6)},
    "that etp cannot split: one, two": {"up": (4, 12, 8), "down": (4, 8, 12), "one": (4, 8), "two": (4, 8)},
}


@pytest.mark.parametrize("message, shapes", REFUSED.items())
def test_other_experts_are_refused(message: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(PlanError, match=rf"{message}.*etp=1"):
        split(Experts(shapes, **({"is_transposed": True} if "one" in shapes else {})))
