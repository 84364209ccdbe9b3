"""Which mixtures of experts of the installed transformers a plan divides. No step is run, and no weight is made.

    python benchmarks/mixture_survey.py
    python benchmarks/mixture_survey.py --only mixtral deepseek_v3

Every family of transformers whose code names experts is built on the meta device, from its configuration's defaults
with few blocks. The table says of each whether its experts are found, and whether `ep=2`, `etp=2` and `tp=2` work
without rules. Where `tp=2` does not, it says whether it does with the rules that the refusal shows. docs/experts.md has
the sums."""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from meshwise.expert.expert_parallel import inner_split
from meshwise.model.find_mixtures import find_mixtures, planned_mixtures
from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import planned_roles

BLOCKS = 8
WITH_RULES = "tp=2 with the rules shown"
_CONFIGURATIONS: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2_moe": {"num_hidden_layers": BLOCKS, "layer_types": ["conv", "full_attention"] * (BLOCKS // 2)},
}
"""Values that a configuration has no default for."""
_MODELS = {
    **modeling_auto.MODEL_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


def families(only: Sequence[str]) -> Iterator[tuple[str, type, type]]:
    """Yield name, configuration class and model class of each family whose code names experts.

    Of a family with a text model and one with images, the text model is taken."""
    root = Path(str(transformers.__file__)).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        name = path.parent.name
        if "experts" not in path.read_text(errors="ignore") or (only and name not in only):
            continue
        kinds = [kind for kind in _CONFIGURATIONS if kind.replace("-", "_").startswith(name)]
        kind = next((kind for kind in (f"{name}_text", name, *kinds) if kind in _MODELS), "")
        if kind:
            model = _MODELS[kind]
            model = model if isinstance(model, str) else model[0]
            yield name, getattr(transformers, _CONFIGURATIONS[kind]), getattr(transformers, model)


def small(configuration: Any) -> Any:
    """Return the configuration with few blocks, also in the configurations inside of it."""
    for key, value in list(vars(configuration).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            small(value)
        elif key in _LAYERS and isinstance(value, int):
            setattr(configuration, key, min(value, BLOCKS))
        elif isinstance(value, list) and "layer" in key and len(value) > BLOCKS:
            setattr(configuration, key, value[:BLOCKS])
    return configuration


def answer(call: Callable[[], Any]) -> str:
    """Return "yes", or the start of the error's message."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 -- an answer, whatever it is
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return "yes"


def answers(model: nn.Module) -> dict[str, str]:
    """Return what each plan says to the model, by plan."""
    found = find_mixtures(model)

    def inner() -> None:
        for name, mixture in found.items():
            inner_split(model.get_submodule(name), mixture=mixture, name=name)

    said = {
        "ep=2": answer(lambda: planned_mixtures(model, plan=Plan.parse("dp=2 ep=2"))),
        "etp=2": answer(inner),
        "tp=2": answer(lambda: planned_roles(model, plan=Plan.parse("tp=2"), rules=None)),
    }
    return said if said["tp=2"] == "yes" else {**said, WITH_RULES: answer(lambda: with_shown_rules(model))}


def with_shown_rules(model: nn.Module) -> None:
    """Find the roles under `tp=2` with the rules that the refusal without rules shows."""
    try:
        planned_roles(model, plan=Plan.parse("tp=2"), rules=None)
    except ValueError as error:
        rules = dict(re.findall(r'"([^"]+)": "([^"]+)"', str(error).partition("as in ")[2]))
        planned_roles(model, plan=Plan.parse("tp=2"), rules=rules)


def main() -> None:
    """Print the table and its sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="folders of transformers.models")
    only = parser.parse_args().only
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sums = Counter[str]()
    for name, configuration, kind in families(only):
        try:
            with torch.device("meta"):
                model = kind(small(configuration(**GIVEN.get(name, {}))))
        except Exception as error:  # noqa: BLE001 -- a configuration whose defaults build no model
            print(f"{name:24} not built: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
            sums["not built"] += 1
            continue
        if not find_mixtures(model):
            print(f"{name:24} no mixture found in {kind.__name__}", flush=True)
            sums["no mixture found"] += 1
            continue
        sums["mixtures"] += 1
        said = answers(model)
        sums.update(plan for plan, word in said.items() if word == "yes")
        print(f"{name:24} " + "  ".join(f"{plan}: {word}" for plan, word in said.items()), flush=True)
    print(f"transformers {transformers.__version__}:", ", ".join(f"{many} {what}" for what, many in sums.items()))


if __name__ == "__main__":
    main()
