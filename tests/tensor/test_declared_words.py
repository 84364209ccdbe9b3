"""Test that every word of the plans that models of the installed transformers declare is one that is known here."""

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

import torch
import transformers

from meshwise.model.find_mixtures import find_mixtures
from meshwise.tensor.detect.attention_names import DECLARED
from mixture_survey import GIVEN, families, small

EXPERTS = {"grouped_gemm", "ep_dispatch_experts"}
"""Words of experts in a `base_model_ep_plan`; `find_mixtures` finds these modules by their parameters."""
ROUTERS = {"ep_router"}
"""Words of routers in a `base_model_ep_plan` before transformers 5.23; every rank has each router whole."""
STAGES = {"input_ids", "inputs_embeds", "hidden_states", "attention_mask"}
"""Arguments and results of stages in a `base_model_pp_plan`, which the cut of a model does not read."""


def words(value: ast.expr) -> Iterator[str]:
    """Yield the words of a plan: strings that are no key, also in a tuple of lists."""
    for node in ast.walk(value):
        held = [node.value] if isinstance(node, ast.DictComp) else []
        if isinstance(node, ast.Dict):
            held = [each for key, each in zip(node.keys, node.values, strict=True) if key is not None]
        for each in held:
            yield from (str(one.value) for one in ast.walk(each) if isinstance(one, ast.Constant))


@cache
def declared() -> Mapping[str, set[str]]:
    """Return the words of all configuration classes by plan, without importing one; `_tp_plan` is of model classes."""
    found: dict[str, set[str]] = defaultdict(set)
    models = Path(str(transformers.__file__)).parent / "models"
    for path in models.glob("*/configuration_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "base_model_" in text else ():
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found[ast.unparse(target)].update(words(node.value))
    for path in models.glob("*/modeling_*.py"):
        for plan in re.findall(r"^    _tp_plan = \{(.*)\}", path.read_text(), re.MULTILINE):
            found["_tp_plan"].update(re.findall(r': "(\w+)"', plan))
    return found


@pytest.mark.parametrize("plan", ["base_model_tp_plan", "_tp_plan"])
def test_a_role_or_none_is_known_for_every_word_of_tensor_parallelism(plan: str) -> None:
    assert declared()[plan] >= {"rowwise_split_input"}
    assert declared()[plan] - set(DECLARED) == set()


def test_the_words_of_expert_parallelism_are_those_of_modules_that_are_found() -> None:
    assert declared()["base_model_ep_plan"]
    assert declared()["base_model_ep_plan"] - EXPERTS - ROUTERS - set(DECLARED) == set()


def test_the_words_of_pipelines_are_names_of_what_stages_exchange() -> None:
    assert declared()["base_model_pp_plan"]
    assert declared()["base_model_pp_plan"] - STAGES == set()


def declared_experts(model: Any) -> set[str]:
    """Return the modules of a model that the `base_model_ep_plan` of its configuration calls experts."""
    patterns = getattr(model.config.get_text_config(), "base_model_ep_plan", None) or {}
    ends = [key.split(".") for key, word in patterns.items() if word == "ep_dispatch_experts"]
    names = [name for name, _ in model.named_modules()]
    return {
        name
        for name in names
        for end in ends
        if all(map(fnmatchcase, name.split(".")[-len(end) :], end)) and name.count(".") >= len(end) - 1
    }


def test_declared_experts_are_the_mixtures_that_are_found() -> None:
    """Build every family on the meta device, and compare the declared experts with those that its parameters show."""
    compared = 0
    for name, configuration, kind in families([]):
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                settings = small(configuration(**GIVEN.get(name, {})))
                if not getattr(settings.get_text_config(), "base_model_ep_plan", None):
                    continue
                model = kind(settings)
        except (AttributeError, TypeError):  # four configurations, whose defaults build no model
            continue
        if experts := declared_experts(model):
            assert set(find_mixtures(model)) == experts, name
            compared += 1
    assert compared >= 50
