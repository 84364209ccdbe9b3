"""Let each expert take at most a capacity of each sample's tokens, and drop the rest. This changes the model.

    most tokens of a sample for one expert = ceil(capacity · tokens of the sample · choices / experts)

It is the expert capacity of Switch Transformers (Fedus et al., arXiv 2101.03961, section 2.2), for one sample instead
of a batch. docs/experts.md says which tokens an expert keeps ("Drop tokens"); a token's first choice goes before its
second.

Hooks decide before a module of experts runs. On one process a dropped pair has the weight 0; where experts are
divided it is not sent."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.expert.expert_parallel import SplitExperts
from meshwise.expert.router_losses import OverTokens, RouterLosses, module_around, router_of, tokens_of_sample
from meshwise.expert.router_updates import RouterUpdates
from meshwise.model.find_mixtures import Mixture, find_mixtures, ruled_mixtures
from meshwise.plan import Plan, PlanError


class ExpertCapacity:
    """Hooks that limit the experts of one mixture, on the module of experts and on the module around it."""

    def __init__(self, capacity: float, *, mixture: Mixture, over_tokens: OverTokens | None, count: Any) -> None:
        """`capacity`: most tokens of a sample for one expert, over the even share; `count`: a `count_drops`."""
        self._capacity, self._mixture, self._count = capacity, mixture, count
        self._over_tokens: OverTokens = over_tokens or (lambda x, *, function, **_: function(x))
        self._tokens = 0

    def _note_tokens(self, module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        """Note the tokens of a sample before the module around the experts runs."""
        self._tokens = tokens_of_sample(module, arguments=(given, named), option=f"expert_capacity={self._capacity}")

    def _drop(self, experts: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return the arguments of the experts without the dropped pairs."""
        if given[0].is_meta:
            return None
        if self._mixture.form == "rows":
            chosen = (given[0] != 0).any(-1).view(self._mixture.experts, -1, self._tokens)
            dropped = self._over_tokens(chosen, function=self._dropped_rows, dim=2)
            self._count(chosen, dropped=dropped)
            return (given[0].masked_fill(dropped.reshape(-1, 1), 0), *given[1:]), named
        tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        index = next(each for each in tensors if not each.is_floating_point())
        weights = next(each for each in tensors[1:] if each.is_floating_point())
        by_sample = index.reshape(-1, self._tokens, index.size(-1))
        dropped = self._over_tokens(by_sample, function=self._dropped_pairs, dim=1).reshape(index.shape)
        self._count(index < self._mixture.experts, dropped=dropped)
        if isinstance(experts, SplitExperts):
            old, new = index, index.masked_fill(dropped, self._mixture.experts)
        else:
            old, new = weights, weights.masked_fill(dropped, 0)
        swap = lambda each: new if each is old else each  # noqa: E731
        return tuple(map(swap, given)), {key: swap(each) for key, each in named.items()}

    def _dropped_pairs(self, index: Tensor) -> Tensor:
        """Return True for each pair whose expert has been chosen too often; `index`: (samples, tokens, choices)."""
        most = math.ceil(index.size(1) * index.size(2) / self._mixture.experts * self._capacity)
        ordered, order = index.flatten(1).sort(dim=1, stable=True)
        places = torch.arange(order.size(1), device=index.device) - torch.searchsorted(ordered, ordered)
        return (torch.empty_like(places).scatter_(1, order, places) >= most).view_as(index)

    def _dropped_rows(self, chosen: Tensor) -> Tensor:
        """Return True for each row whose expert has been chosen too often; `chosen`: (experts, samples, tokens)."""
        choices = chosen.sum(0).max().double()
        return chosen.cumsum(-1) > (chosen.size(-1) * choices / self._mixture.experts * self._capacity).ceil()


def limit_experts(
    module: nn.Module, *, capacity: float | None, routers: RouterUpdates, over_tokens: OverTokens | None = None
) -> None:
    """Limit the experts of a model's mixtures, by hooks. `capacity`: as in `ExpertCapacity`; None: no limit.

    Call it before the experts are divided. `over_tokens`: None if this rank has all tokens of its samples."""
    for name, mixture in find_mixtures(module).items() if capacity else ():
        around, experts = module.get_submodule(module_around(name)), module.get_submodule(name)
        count = partial(routers.count_drops, name=name)
        own = ExpertCapacity(capacity or 0, mixture=mixture, over_tokens=over_tokens, count=count)
        routers.undo.callback(around.register_forward_pre_hook(own._note_tokens, with_kwargs=True).remove)
        routers.undo.callback(experts.register_forward_pre_hook(own._drop, with_kwargs=True).remove)


def check_experts(
    module: nn.Module, *, capacity: float | None, losses: RouterLosses, plan: Plan, rules: Mapping[str, str] | None
) -> None:
    """Raise PlanError for a capacity or losses of routers with which the plan or the model cannot work."""
    if capacity is not None and not 0 < capacity < math.inf:
        raise PlanError(f"expert_capacity={capacity} is no number above 0. Leave it out to drop no token, or give 1.25")
    given = [f"expert_capacity={capacity}"] * (capacity is not None) + ["router_losses"] * bool(losses)
    mixtures = {**find_mixtures(module), **ruled_mixtures(module, rules=rules)} if given else {}
    called = [name for name, mixture in mixtures.items() if mixture.form == "called"]
    for option in given:
        if not mixtures:
            raise PlanError(f"{option}: {type(module).__name__} has no mixture of experts. Leave it out")
        if called:
            raise PlanError(
                f"{option}: {called[0]} calls its experts with rows that do not show their samples. Leave it out; "
                "Switch Transformers and NLLB have a capacity in their own configuration, and return losses"
            )
        if plan.sequence_parallel:
            raise PlanError(
                f"{option} counts all tokens of a sample, and the plan '{plan}' splits them. Nearest that works: "
                f"'{dataclasses.replace(plan.with_whole_experts, sequence_parallel=0)}'"
            )
    for name, mixture in mixtures.items() if losses else ():
        if router_of(module, name=name, experts=mixture.experts) is None:
            raise PlanError(
                f"router_losses: no module beside {name} has a weight of ({mixture.experts}, features), by which a "
                "router is found. Leave it out, or give the router such a weight"
            )
