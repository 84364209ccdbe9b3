"""Find the mixtures of experts in a plain model: modules that hold the parameters of all experts together.

Such a module is called with tokens (tokens, features), the numbers of the chosen experts (tokens, k) and their weights
(tokens, k), as in transformers 5. Each of its own parameters has the experts as its first dim:

    gate_up_proj (experts, 2 * inner, features)    down_proj (experts, features, inner)
"""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from meshwise.plan import Plan, PlanError

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "experts")
"""Names of the attribute that counts the experts of a module."""


@dataclass(frozen=True)
class Mixture:
    """The experts of one mixture.

    | experts   number of experts
    | counts    attributes that hold this number
    """

    experts: int
    counts: tuple[str, ...]


def find_mixtures(module: nn.Module) -> Mapping[str, Mixture]:
    """Return the modules that hold experts, by name. The module may be on the meta device."""
    found = {}
    for name, each in module.named_modules():
        own = list(each.parameters(recurse=False))
        counts = tuple(key for key in COUNTS if type(vars(each).get(key)) is int)
        if not counts or not any(parameter.dim() == 3 for parameter in own):
            continue
        experts = vars(each)[counts[0]]
        if all(parameter.size(0) == experts for parameter in own) and _takes_routing(each):
            found[name] = Mixture(experts, tuple(key for key in counts if vars(each)[key] == experts))
    return found


def planned_mixtures(module: nn.Module, *, plan: Plan) -> Mapping[str, Mixture]:
    """Return the mixtures of a model by name; none if the plan has neither `ep`, `etp` nor `tp`.

    Raises PlanError if `ep` is above 1 and the model has no mixture, or one with fewer experts.
    """
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


def _takes_routing(module: nn.Module) -> bool:
    """Return whether a module's forward takes tokens, the numbers of their experts, and weights."""
    return len(inspect.signature(module.forward).parameters) >= 3
