"""Find the mixtures of experts in a plain model: modules that hold the parameters of all experts together.

    | form      parameters                             forward
    | stacked   experts are the first dim of each      tokens (n, features), experts (n, k), weights (n, k)
    | rows      as for stacked, without biases         rows (experts · n, features): all n tokens, once per expert
    | called    a child module for each expert         any; the module or its parent calls each expert with rows

A list without its own forward is found only by a rule: {"blocks.*.moe": "experts"}. In transformers 5, Llama 4
has the form `rows`, Switch Transformers and NLLB have `called`, all others `stacked`."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from meshwise.model.parameter_units import matches
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
    form: Literal["stacked", "rows", "called"] = "stacked"


def find_mixtures(module: nn.Module) -> Mapping[str, Mixture]:
    """Return the modules that hold experts, by name. The module may be on the meta device."""
    found = {name: _mixture(each) for name, each in module.named_modules()}
    return {name: mixture for name, mixture in found.items() if mixture is not None}


def ruled_mixtures(module: nn.Module, *, rules: Mapping[str, str] | None) -> Mapping[str, Mixture]:
    """Return the mixtures that rules name, by the name of their ModuleList.

    A rule names a ModuleList, or a module with exactly one ModuleList as child. Raises ValueError for others."""
    found = {}
    modules = dict(module.named_modules())
    for pattern in (pattern for pattern, role in (rules or {}).items() if role == "experts"):
        for name in (name for name in modules if matches(name, pattern=pattern)):
            children = modules[name].named_children()
            inside = [f"{name}.{key}".lstrip(".") for key, each in children if isinstance(each, nn.ModuleList)]
            lists = [name] if isinstance(modules[name], nn.ModuleList) else inside
            if len(lists) != 1:
                near = f"Name one of its lists: {{'{lists[0]}': 'experts'}}" if lists else "Name a module with one list"
                raise ValueError(
                    f"rule {pattern!r}: {name} ({type(modules[name]).__name__}) has {len(lists)} ModuleLists, but "
                    f"'experts' needs exactly one. {near}"
                )
            found[lists[0]] = Mixture(len(list(modules[lists[0]].children())), (), "called")
    return found


def planned_mixtures(module: nn.Module, *, plan: Plan, rules: Mapping[str, str] | None = None) -> Mapping[str, Mixture]:
    """Return the mixtures of a model by name; none if the plan has neither `ep`, `etp` nor `tp`.

    Raises PlanError if the plan divides experts and the model has none or too few, or cannot copy them."""
    if plan.ep == plan.etp == plan.tp == 1:
        return {}
    found = {**find_mixtures(module), **ruled_mixtures(module, rules=rules)}
    if not found and max(plan.ep, plan.etp) > 1:
        raise PlanError(
            f"the plan '{plan}' divides experts, but no module of {type(module).__name__} was found that holds the "
            "parameters of all experts. If a block calls experts of a ModuleList, name it in Options(tensor_rules=…): "
            f'{{"blocks.*.moe": "experts"}}. Nearest that works as it is: \'{plan.with_whole_experts}\''
        )
    for name, mixture in found.items():
        if plan.ep > mixture.experts:
            raise PlanError(
                f"ep={plan.ep}: {name} has only {mixture.experts} experts. Nearest that works: 'ep={mixture.experts}'"
            )
        if plan.replicate and (plan.replicate >= mixture.experts or mixture.form == "called"):
            has = f"only {mixture.experts} experts" if mixture.form != "called" else "a module per expert, not a tensor"
            raise PlanError(f"replicate={plan.replicate}: {name} has {has}. Nearest that works: 'replicate=0'")
    return found


def compute_experts(module: nn.Module, *, by: str) -> None:
    """Choose how experts of transformers compute. `by`: a value of transformers' `experts_implementation`.

    `eager` computes one after the other, because grouped matrix products refuse float64. It reads values, so the meta
    device needs `grouped_mm`. Each module with experts gets its own copy of its configuration, often shared."""
    for name in find_mixtures(module):
        experts = module.get_submodule(name)
        if "has_gate" in vars(experts):  # transformers sets it if the implementation can be chosen
            config: Any = copy.copy(vars(experts)["config"])
            config._experts_implementation = by
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
    classes = [type(each) for each in module.children() if any(True for _ in each.parameters())]
    if isinstance(module, nn.ModuleDict | nn.ModuleList) and classes == [*classes[:1]] * experts and takes >= 3:
        return Mixture(experts, counts, "called")
    return None
