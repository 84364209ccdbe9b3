from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.layout.layout import Layout
from meshwise.model.deferred_init import build_with_values, shapes_of
from meshwise.model.parameter_table import ParameterRow, ParameterTable, parameter_table
from meshwise.reference import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=32, context=8, layers=1, heads=2, width=16, tied=True, bias=True)


def row_of(table: ParameterTable, name: str) -> ParameterRow:
    """Return the row of a parameter by any of its names."""
    return next(row for row in table.rows if name in (row.name, *row.aliases))


def test_a_row_describes_a_parameter() -> None:
    model = GPT(CONFIG)
    model.norm.requires_grad_(False)
    table = parameter_table(model)
    assert row_of(table, "embedding.weight") == ParameterRow(
        name="embedding.weight",
        shape=(32, 16),
        dtype=torch.float32,
        trainable=True,
        aliases=("head.weight",),
        unit="embedding+positions+norm",
        options=(),
        layout=Layout.replicated(2),
        summed=("dp",),
    )
    assert row_of(table, "norm.bias") == ParameterRow(
        name="norm.bias",
        shape=(16,),
        dtype=torch.float32,
        trainable=False,
        aliases=(),
        unit="embedding+positions+norm",
        options=(("weight_decay", 0.0),),
        layout=Layout.replicated(1),
        summed=("dp",),
    )


def test_a_tied_parameter_is_one_row_under_all_its_names() -> None:
    table = parameter_table(GPT(CONFIG))
    assert row_of(table, "head.weight") is row_of(table, "embedding.weight")
    assert sum(row.numel for row in table.rows) == sum(p.numel() for p in GPT(CONFIG).parameters())


def test_a_tied_module_gives_aliases_to_all_its_parameters() -> None:
    layer = nn.Linear(2, 2)
    table = parameter_table(nn.Sequential(layer, nn.ReLU(), layer))
    assert [(row.name, row.aliases) for row in table.rows] == [("0.weight", ("2.weight",)), ("0.bias", ("2.bias",))]


def test_only_matrices_are_decayed_by_default() -> None:
    for row in parameter_table(GPT(CONFIG)).rows:
        assert dict(row.options) == ({} if len(row.shape) > 1 else {"weight_decay": 0.0}), row.name


def test_the_users_options_replace_the_default() -> None:
    def options(name: str, parameter: Tensor) -> Mapping[str, Any]:
        return {"lr": 0.5, "betas": (0.8, 0.9)} if name.startswith("head") or parameter.ndim == 1 else {}

    table = parameter_table(GPT(CONFIG), options=options)
    assert row_of(table, "norm.weight").options == (("betas", (0.8, 0.9)), ("lr", 0.5))
    assert row_of(table, "head.weight").options == (), "the rule sees the first name"


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        parameter_table(nn.ReLU())


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        parameter_table(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.LazyLinear(3))])
def test_a_model_with_a_parameter_without_a_shape_is_refused_by_build_with_values(model: Any) -> None:
    for look in (build_with_values, shapes_of):
        with pytest.raises(ValueError, match=r"0\.weight has no shape yet; call the model once on an example"):
            look(model, seed=0)


def test_options_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter_options returned None for weight; .* \{\} for none"):
        parameter_table(nn.Linear(2, 2), options=lambda _name, _parameter: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_over_the_same_memory_are_refused(device: str) -> None:
    first, second = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    second.weight = nn.Parameter(first.weight[:2])
    model = nn.Sequential(first, second)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are two parameters over the same memory"):
        parameter_table(model)


def test_parameters_side_by_side_in_one_memory_are_two() -> None:
    flat = torch.zeros(6)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    assert [row.shape for row in parameter_table(model).rows] == [(4,), (2,)]


def test_the_table_is_the_same_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    assert parameter_table(model) == parameter_table(GPT(CONFIG))
