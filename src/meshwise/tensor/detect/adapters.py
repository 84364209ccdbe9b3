"""Give the adapters of PEFT (LoRA) their parts: they follow the matrix that they adapt.

An adapted linear computes W x + B A x. The parts of W are found in the model without adapters. Under 1d

    | W          A                            B
    | colwise    whole: its input is whole    colwise: its output is split as W's
    | rowwise    rowwise: its input is split  whole: its input is summed over the ranks
    | whole      whole                        whole"""

import copy
from collections.abc import Mapping

from torch import nn

from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.part import Part
from meshwise.tensor.detect.known_names import full_name

_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
_KNOWN = ("base_layer", "lora_A", "lora_B")


def without_adapters(module: nn.Module) -> nn.Module:
    """Return a model in which each adapted layer is replaced by its base layer; `module` itself without adapters.

    Modules around adapted layers are shallow copies; parameters and other modules are shared."""
    if _is_adapted(module):
        return module.get_submodule("base_layer")
    children = {name: child and without_adapters(child) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    bare = copy.copy(module)
    bare._modules = children
    return bare


def with_adapters(parts: Mapping[str, Part], *, module: nn.Module, plan: Plan) -> dict[str, Part]:
    """Return the parts of an adapted model. `parts`: found in the model without adapters.

    Raises PlanError for adapters that tensor parallelism does not know, with the plan or setting that works."""
    found = dict(parts)
    for name, layer in [(name, one) for name, one in module.named_modules() if _is_adapted(one)]:
        part = found.pop(name, Part("whole"))
        found[f"{name}.base_layer"] = part
        _refuse_unknown(name, layer, part, plan)
        # Where the pair has gathered the input, each rank's gradient of A is a term, as that of a norm of its heads.
        first = part if part.role == "rowwise" else Part("each_head" if part.gathered else "whole")
        ends = {"lora_A": first, "lora_B": part if part.role == "colwise" else Part("whole")}
        for matrices, end in ends.items():
            found |= {f"{name}.{matrices}.{adapter}": end for adapter in layer.get_submodule(matrices)._modules}
    return found


def _is_adapted(module: nn.Module) -> bool:
    return any(full_name(kind) == _ADAPTED for kind in type(module).__mro__)


def _refuse_unknown(name: str, layer: nn.Module, part: Part, plan: Plan) -> None:
    """Raise PlanError for an adapted layer that is not split here."""
    others = [own for own, _ in layer.named_parameters() if own.partition(".")[0] not in _KNOWN]
    drops = [each for each in layer.modules() if isinstance(each, nn.Dropout) and each.p > 0]
    if plan.tp_mode != "1d" or plan.sequence_parallel:
        why = "adapters follow their matrices under tp_mode=1d alone; use tp_mode=1d sequence_parallel=0"
    elif others or part.role not in ("colwise", "rowwise", "whole"):
        what = f"the parameter {others[0]!r}" if others else f"a matrix that is {part.role!r}"
        why = f"it has {what}, and only LoRA of attention and MLP linears is split; use tp=1, or other target_modules"
    elif drops:
        why = "its dropout would depend on the plan; use lora_dropout=0, or tp=1"
    else:
        return
    raise PlanError(f"{name!r} is adapted by PEFT and tp={plan.tp}: {why}")
