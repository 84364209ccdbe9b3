import torch

from meshwise.reference import MLP, MLPConfig


def test_an_mlp_maps_its_first_width_to_its_last() -> None:
    model = MLP(MLPConfig(widths=(3, 7, 5, 2)))
    assert model(torch.zeros(4, 6, 3)).shape == (4, 6, 2)
    assert sum(p.numel() for p in model.parameters()) == 3 * 7 + 7 + 7 * 5 + 5 + 5 * 2 + 2


def test_an_mlp_without_bias_has_matrices_only() -> None:
    assert all(p.ndim == 2 for p in MLP(MLPConfig(widths=(3, 2), bias=False)).parameters())
