"""Find the mixtures of experts in a plain model: modules that hold the parameters of all experts together.

    | form      parameters                             forward
    | stacked   experts are the first dim of each      tokens (n, features), experts (n, k), weights (n, k)
    | rows      as above, without biases               rows (experts · n, features): all tokens for each
    | modules   a child module for each expert         as stacked; the experts may be one-hot (n, k, experts)

In transformers 5, Llama 4 has the form `rows`, Switch Transformers and NLLB have `modules`, all others `stacked`."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from meshwise.plan import Plan, PlanError

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "experts")
"""Names of the attribute that counts the experts of a module."""


@dataclass(frozen=True)
class Mixture:
    """The experts of one mixture.

    | experts   number of experts
    | counts    attributes that hold this number
    | form      how the module stores its experts and is called; see the table of this file"""

    experts: int
    counts: tuple[str, ...]
    form: Literal["stacked", "rows", "modules"] = "stacked"


def find_mixtures(module: nn.Module) -> Mapping[str, Mixture]:
    """Return the modules that hold experts, by name. The module may be on the meta device."""
    found = {name: _mixture(each) for name, each in module.named_modules()}
    return {name: mixture for name, mixture in found.items() if mixture is not None}


def planned_mixtures(module: nn.Module, *, plan: Plan) -> Mapping[str, Mixture]:
    """Return the mixtures of a model by name; none if the plan has neither `ep`, `etp` nor `tp`.

    Raises PlanError if `ep` or `etp` is above 1 and the model has no mixture, or one with fewer experts than `ep`."""
    if plan.ep == plan.etp == plan.tp == 1:
        return {}
    found = find_mixtures(module)
    if not found and max(plan.ep, plan.etp) > 1:
        raise PlanError(
            f"the plan '{plan}' divides experts, but no module of {type(module).__name__} was found that holds the "
            f"parameters of all experts. Nearest that works: '{dataclasses.replace(plan, ep=1, etp=1)}'"
        )
    for name, mixture in found.items():
        if plan.ep > mixture.experts:
            raise PlanError(
                f"ep={plan.ep}: {name} has only {mixture.experts} experts. Nearest that works: 'ep={mixture.experts}'"
            )
    return found


def compute_experts_by_loops(module: nn.Module) -> None:
    """Let experts of transformers compute one expert after the other: their grouped products refuse float64.

    Their modules get a configuration of their own, because a configuration may belong to several models."""
    for name in find_mixtures(module):
        experts = module.get_submodule(name)
        if "_is_expert_parallel" in vars(experts):  # an attribute of all experts that choose an implementation
            config: Any = copy.copy(vars(experts)["config"])
            config._experts_implementation = "eager"
            experts.config = config


def _mixture(module: nn.Module) -> Mixture | None:
    """Return the mixture whose experts a module holds; None for another module."""
    counts = tuple(key for key in COUNTS if type(vars(module).get(key)) is int)
    if not counts:
        return None
    experts = vars(module)[counts[0]]
    counts = tuple(key for key in counts if vars(module)[key] == experts)
    own, takes = list(module.parameters(recurse=False)), len(inspect.signature(module.forward).parameters)
    if any(each.dim() == 3 for each in own) and all(each.size(0) == experts for each in own):
        if takes >= 3:
            return Mixture(experts, counts)
        return Mixture(experts, counts, "rows") if takes == 1 and all(each.dim() == 3 for each in own) else None
    alike = [type(each) for each in module.children() if any(True for _ in each.parameters())]
    if isinstance(module, nn.ModuleDict | nn.ModuleList) and alike == [*alike[:1]] * experts and takes >= 3:
        return Mixture(experts, counts, "modules")
    return None
