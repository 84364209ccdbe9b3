"""Assign roles in tensor parallelism to adapters of PEFT: LoRA, DoRA, IA3 and learned prompts.

Adapters follow the matrix that they adapt. The parts of the matrices are found in the model without adapters. LoRA
computes W x + B A x. DoRA multiplies each output by a factor, from a learned magnitude m. IA3 multiplies outputs of
W x, or inputs x of feedforward modules, by learned factors l. Under 1d:

    | W          A                          B         m                         l of outputs   l of inputs
    | colwise    whole, or each_head (*)    colwise   magnitude, split as W x   inner          whole, or each_head (*)
    | rowwise    rowwise                    whole     magnitude, whole          whole          inner
    | whole      whole                      whole     whole                     whole          whole

(*) If an attention gathers x, each rank has one term of the gradient of A or l. The role `each_head` sums the terms.

`expert/expert_parallel.py` divides the adapters of experts. Learned prompts are whole: they enter as embeddings."""

import copy
import dataclasses
from collections.abc import Mapping

from torch import nn

from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.detect.attention_names import enclosing, full_name

_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
_KNOWN = ("base_layer", "lora_A", "lora_B", "lora_magnitude_vector", "ia3_l")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT with adapters around a layer of the model."""
    return any(full_name(kind) == _ADAPTED for kind in type(module).__mro__)


def without_adapters(module: nn.Module) -> nn.Module:
    """Return a model in which each adapted layer is replaced by its base layer; `module` itself without adapters.

    Modules around adapted layers are shallow copies; parameters and other modules are shared."""
    if is_adapted(module):
        return without_adapters(module.get_submodule("base_layer"))
    children = {name: child if child is None else without_adapters(child) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    bare = copy.copy(module)
    bare._modules = children
    return bare


def prompt_rules(module: nn.Module, *, plan: Plan) -> dict[str, str]:
    """Return rules that keep the learned prompts of PEFT whole. Raises PlanError for prefixes of keys and values."""
    kinds = {str(getattr(config, "peft_type", "")) for config in (getattr(module, "peft_config", None) or {}).values()}
    if any("PREFIX" in kind for kind in kinds):
        raise PlanError(
            f"prefix tuning of PEFT makes keys and values of all heads, and a rank of tp={plan.tp} has some heads; use "
            "tp=1, or PromptTuningConfig"
        )
    return {"prompt_encoder": "whole"} if "prompt_encoder" in module._modules and kinds else {}


def with_adapters(parts: Mapping[str, Part], *, module: nn.Module, plan: Plan) -> dict[str, Part]:
    """Return the parts of an adapted model. `parts`: found in the model without adapters.

    Raises PlanError for adapters that tensor parallelism does not know, with the plan or setting that works."""
    found = dict(parts)
    for name, layer in [(name, one) for name, one in module.named_modules() if is_adapted(one)]:
        part = found.pop(name, Part("whole"))
        found[f"{name}.base_layer"] = part
        if part.role == "experts":
            found |= dict.fromkeys((f"{name}.lora_A", f"{name}.lora_B"), part)
        elif not any(holder in found and found[holder].role == "experts" for holder in enclosing(name)):
            _refuse_unknown(name, layer, part, plan)
            found |= {f"{name}.{key}": each for key, each in _of_adapters(layer, part).items()}
    return found


def _of_adapters(layer: nn.Module, part: Part) -> dict[str, Part]:
    """Return the parts of the adapters of a layer whose matrix has `part`, by name within the layer."""
    outputs, inputs = part.role == "colwise", part.role == "rowwise"
    whole, inner = Part("whole"), dataclasses.replace(part, role="inner")
    magnitude = dataclasses.replace(part, role="magnitude", inner=outputs)
    reader = Part("each_head") if part.gathered else whole
    scaled_inputs = inputs if vars(layer).get("is_feedforward") else None
    ends = {
        "lora_A": part if inputs else reader,
        "lora_B": part if outputs else whole,
        "lora_magnitude_vector": whole if part.role == "whole" else magnitude,
        "lora_dropout": Part("dropout", inner=inputs, grain=part.grain),
        "ia3_l": (inner if outputs else whole) if scaled_inputs is None else inner if inputs else reader,
    }
    held = {kind: layer._modules.get(kind) for kind in ends}
    return {
        f"{kind}.{adapter}": ends[kind]
        for kind, adapters in held.items()
        if adapters is not None
        for adapter in (*adapters._modules, *adapters._parameters)
    }


def _refuse_unknown(name: str, layer: nn.Module, part: Part, plan: Plan) -> None:
    """Raise PlanError for an adapted layer that tensor parallelism cannot split."""
    others = [own for own, _ in layer.named_parameters() if own.partition(".")[0] not in _KNOWN]
    drops = any(isinstance(each, nn.Dropout) and each.p > 0 for each in layer.modules())
    if plan.tp_mode != "1d" or plan.sequence_parallel:
        why = "adapters follow their matrices under tp_mode=1d alone; use tp_mode=1d sequence_parallel=0"
    elif others or part.role not in ("colwise", "rowwise", "whole"):
        what = f"the parameter {others[0]!r}" if others else f"a matrix that is {part.role!r}"
        known = "only LoRA, DoRA and IA3 of attention and MLP linears are split"
        why = f"it has {what}, and {known}; use tp=1, or other target_modules"
    elif drops and part.role != "whole" and layer._modules.get("lora_magnitude_vector"):
        why = "DoRA multiplies the whole matrix by an input with dropout; use lora_dropout=0, or tp=1"
    else:
        return
    raise PlanError(f"PEFT adapter of {name!r} under tp={plan.tp}: {why}")
