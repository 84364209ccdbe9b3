"""Test that models with gated attentions, values of another width or image encoders train as on one process."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

from expert.further_families import FAMILIES, Family
from expert.mixtures_of_transformers import BUILDING, batches, build, built, check, loss
from grid import Grid, ranks_of
from meshwise.engine.parallelize import Options
from meshwise.plan import Plan, PlanError
from meshwise.tensor.detect.assign_tp_roles import planned_roles
from tensor.plain import shown

RULES = {
    "Qwen3Next": {"model.layers.*.linear_attn": "whole"},
    "Qwen3_5": {"model.layers.*.linear_attn": "whole"},
    "Qwen3Omni": {"model.visual.merger_list.*.ln_q": "whole"},
    "UnlimitedOcr": {f"model.vision_tower.sam_encoder.neck.layer_norm{one}": "whole" for one in (1, 2)},
    "HunYuanV4": {
        **{f"model.layers.*.{part}_hc": "whole" for part in ("attn", "ffn")},
        "model.hc_head": "whole",
    },
}
"""Rules of the families with a part that tensor parallelism does not split, which the refusal shows."""


def model_of(family: Family) -> Any:
    """Return a model whose parameters all get gradients: some are zeros at first."""
    with BUILDING:
        model = built(family.configuration, family.model, family.settings)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


ON_TWO = ("tp=2 ep=2", "tp=2 etp=2")
"""What `dp=2 tp=2 ep=2 etp=2` divides, on fewer ranks."""

ALIKE = ("MistralLarge4", "Qwen3_5", "HunYuan")
"""Families with the structure of AXK2, of Qwen3Next and of GraniteMoe."""

PLANS = Grid(
    {
        "name": tuple(FAMILIES),
        "plan": (*dict.fromkeys(plan for family in FAMILIES.values() for plan in family.plans), *ON_TWO),
    },
    exists=lambda cell: (
        cell["plan"] in FAMILIES[cell["name"]].plans
        or (cell["plan"] in ON_TWO and "dp=2 tp=2 ep=2 etp=2" in FAMILIES[cell["name"]].plans)
    ),
    cost=lambda cell: ranks_of(cell["plan"]),
    strength=1,
    # one of a structure, and four ranks that divide experts in both ways with a small family
    heavy=lambda cell: (
        cell["name"] in ALIKE
        or ("etp" in cell["plan"] and "dp" in cell["plan"] and cell["name"] != "GraniteMoe")
        # further tests have ranks that share key heads and split tokens
        or cell["plan"] == "tp=4 sequence_parallel=1"
    ),
)


@pytest.mark.grid(PLANS)
def test_two_steps_are_those_of_one_process(name: str, plan: str) -> None:
    family = FAMILIES[name]
    options = Options(clip_norm=0.5, forward=family.forward, example=batches()[0], tensor_rules=RULES.get(name, {}))
    check(model_of(family), plan, given=lambda: {"loss": loss, "lr": 1e-2, "options": options})


@pytest.mark.parametrize("name", RULES)
def test_a_refusal_shows_one_rule_for_each_module_to_keep_whole(name: str) -> None:
    with pytest.raises(ValueError, match="found no role for these parameters") as caught:
        planned_roles(model_of(FAMILIES[name]), plan=Plan(tp=2), rules=None)
    assert shown(caught.value) == RULES[name]


def test_every_parameter_of_an_image_encoder_has_a_role_of_its_width() -> None:
    parts = planned_roles(model_of(FAMILIES["Step3p7"]), plan=Plan(tp=2), rules=None)
    assert {parts[f"model.{part}.layers.0"].hidden_width for part in ("vision_model", "language_model")} == {16, 32}
    with pytest.raises(
        PlanError, match=r"of 16 and of 32 features.*Nearest that works: tp_mode=1d sequence_parallel=0"
    ):
        planned_roles(model_of(FAMILIES["Step3p7"]), plan=Plan.parse("tp=2 sequence_parallel=1"), rules=None)


@pytest.mark.grid(
    Grid({"plan": ("tp=4", "tp=4 ep=4", "tp=4 sequence_parallel=1")}, heavy=lambda cell: cell["plan"] == "tp=4")
)
def test_ranks_that_share_key_heads_count_each_token_of_a_mixture_once(plan: str) -> None:
    check(copy.deepcopy(build("Qwen3Moe", num_key_value_heads=2)), plan)


def test_an_attention_that_compares_heads_of_several_ranks_is_refused() -> None:
    """DiffLlama subtracts the second half of the heads from the first: only its parameters of one head show it."""
    family = Family("DiffLlamaConfig", "DiffLlamaForCausalLM", {}, ())
    with pytest.raises(ValueError, match=r"lambda_q1(.|\n)*\{\"model\.layers\.\*\.self_attn\": \"whole\"\}"):
        planned_roles(model_of(family), plan=Plan(tp=2), rules=None)
